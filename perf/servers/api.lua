-- What nginx does not do by itself: metadata, and uploads of both APIs of Cloud Storage, but for a
-- PUT of a whole object.
--
-- Small bodies lie in files when this runs, and are renamed. Large ones are hashed as they come and
-- dropped: fresh memory for them would cost the server several times what a client takes to send
-- them, and it is the client that is measured. More than KEPT_BYTES are large. Sizes and checksums
-- are told and compared either way.

local ffi = require "ffi"
local bit = require "bit"

ffi.cdef [[
int open(const char *path, int flags, ...);
int close(int fd);
int mkdir(const char *path, unsigned int mode);
long lseek(int fd, long offset, int whence);
long pread(int fd, void *buffer, size_t count, long offset);
void *mmap(void *address, size_t length, int protection, int flags, int fd, long offset);
int munmap(void *address, size_t length);
uint32_t crc32c_extend(uint32_t crc, const uint8_t *data, size_t count);
]]

local library = ffi.load(CRC32C_LIBRARY)
local OBJECTS, UPLOADS = DIRECTORY .. "/objects", DIRECTORY .. "/uploads"
local ASSEMBLED_BYTES = 64 * 1024 * 1024 -- parts of no more than this become an object
local PIECE_BYTES = 64 * 1024 -- of a large body; LuaJIT maps memory anew for strings twice as long
local NAMESPACE = ' xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
local SMALL_BYTES = 1024 * 1024
local small = ffi.new("uint8_t[?]", SMALL_BYTES)
local state = ngx.shared.state

-- --- files -------------------------------------------------------------------------------------

-- Return size and crc32c of a file, or nil where there is none.
local function measure(path)
    local fd = ffi.C.open(path, 0)
    if fd < 0 then return nil end
    local size = tonumber(ffi.C.lseek(fd, 0, 2))
    local crc = 0
    if size <= SMALL_BYTES then
        -- To copy so little costs less than to map it.
        assert(ffi.C.pread(fd, small, size, 0) == size)
        crc = library.crc32c_extend(0, small, size)
    else
        -- PROT_READ; MAP_SHARED and MAP_POPULATE: one call in place of a fault for each page.
        local data = ffi.C.mmap(nil, size, 1, 0x8001, fd, 0)
        crc = library.crc32c_extend(0, ffi.cast("const uint8_t *", data), size)
        ffi.C.munmap(data, size)
    end
    ffi.C.close(fd)
    return size, crc
end

local made = {}

local function make_directories(path)
    local parent = path:match("^(.*)/[^/]+$")
    if made[parent] then return end
    for at in parent:gmatch("()/") do
        if at > 1 then ffi.C.mkdir(parent:sub(1, at - 1), 493) end
    end
    ffi.C.mkdir(parent, 493)
    made[parent] = true
end

local function object_path(bucket, key)
    if (bucket .. "/" .. key .. "/"):find("/%.%.?/") then return nil end
    return OBJECTS .. "/" .. bucket .. "/" .. key
end

-- Hash and drop the body of this request; return its size and crc32c.
local function swallow(length)
    local socket, size, crc = assert(ngx.req.socket()), 0, 0
    socket:settimeout(60000)
    while size < length do
        local data = assert(socket:receiveany(math.min(PIECE_BYTES, length - size)))
        crc = library.crc32c_extend(crc, data, #data)
        size = size + #data
    end
    return size, crc
end

-- Put the body of this request into a file where it is small; return its size and crc32c, and
-- whether there is the file.
local function take_body(path)
    local length = tonumber(ngx.var.http_content_length or 0)
    if length > KEPT_BYTES then
        local size, crc = swallow(length)
        return size, crc, false
    end
    ngx.req.read_body()
    local file = ngx.req.get_body_file()
    if file then
        assert(os.rename(file, path))
    else
        assert(io.open(path, "wb")):close()
    end
    local size, crc = measure(path)
    return size, crc, true
end

local function read_body()
    ngx.req.read_body()
    local file = ngx.req.get_body_file()
    if not file then return ngx.req.get_body_data() or "" end
    local handle = assert(io.open(file, "rb"))
    local data = handle:read("*a")
    handle:close()
    return data
end

-- --- crc32c of two pieces from those of each, as zlib's crc32_combine ---------------------------

local function times(matrix, vector)
    local sum, at = 0, 0
    while vector ~= 0 do
        if bit.band(vector, 1) ~= 0 then sum = bit.bxor(sum, matrix[at]) end
        vector = bit.rshift(vector, 1)
        at = at + 1
    end
    return sum
end

local function square(matrix)
    local result = {}
    for at = 0, 31 do result[at] = times(matrix, matrix[at]) end
    return result
end

local zeros = {} -- zeros[n] advances a crc32c over 2^n zero bytes
do
    local one = { [0] = bit.tobit(0x82f63b78) }
    for at = 1, 31 do one[at] = bit.lshift(1, at - 1) end
    zeros[0] = square(square(square(one)))
    for at = 1, 40 do zeros[at] = square(zeros[at - 1]) end
end

local function combine(first, second, size)
    local at = 0
    while size > 0 do
        if size % 2 == 1 then first = times(zeros[at], first) end
        size = math.floor(size / 2)
        at = at + 1
    end
    return bit.bxor(first, second)
end

-- --- answers -----------------------------------------------------------------------------------

local function encode(crc)
    crc = bit.tobit(crc)
    return ngx.encode_base64(string.char(
        bit.band(bit.rshift(crc, 24), 255), bit.band(bit.rshift(crc, 16), 255),
        bit.band(bit.rshift(crc, 8), 255), bit.band(crc, 255)))
end

local function answer(status, body, content_type)
    ngx.status = status
    ngx.header["Content-Type"] = content_type or "application/xml; charset=UTF-8"
    ngx.header["Content-Length"] = #(body or "")
    if body and body ~= "" and ngx.req.get_method() ~= "HEAD" then ngx.print(body) end
    return ngx.exit(ngx.OK)
end

local function refuse(status, code, message)
    local uri = ngx.var.request_uri
    if uri:find("^/storage/") or uri:find("^/upload/") then
        local body = '{"error":{"code":%d,"message":"%s","errors":[{"reason":"%s"}]}}'
        return answer(status, body:format(status, message, code), "application/json")
    end
    local body = "<?xml version='1.0' encoding='UTF-8'?><Error><Code>%s</Code>"
        .. "<Message>%s</Message></Error>"
    return answer(status, body:format(code, message))
end

local function etag_of(size, crc) return ('"%08x%x"'):format(bit.tobit(crc), size) end

local function tell(size, crc)
    ngx.header["ETag"] = etag_of(size, crc)
    ngx.header["x-goog-generation"] = "1"
    ngx.header["x-goog-metageneration"] = "1"
    ngx.header["x-goog-stored-content-length"] = ("%d"):format(size)
    ngx.header["x-goog-stored-content-encoding"] = "identity"
    ngx.header["x-goog-storage-class"] = "STANDARD"
    ngx.header["x-goog-hash"] = "crc32c=" .. encode(crc)
end

local function resource(bucket, key, size, crc)
    local root = ("%s://%s"):format(ngx.var.scheme, ngx.var.http_host)
    local quoted = ngx.escape_uri(key)
    local body = '{"kind":"storage#object","id":"%s/%s/1","selfLink":"%s/storage/v1/b/%s/o/%s",'
        .. '"mediaLink":"%s/download/storage/v1/b/%s/o/%s?generation=1&alt=media","name":"%s",'
        .. '"bucket":"%s","generation":"1","metageneration":"1","contentType":'
        .. '"application/octet-stream","storageClass":"STANDARD","size":"%d","crc32c":"%s",'
        .. '"etag":"%s","timeCreated":"2026-01-01T00:00:00.000Z",'
        .. '"updated":"2026-01-01T00:00:00.000Z"}'
    return body:format(bucket, key, root, bucket, quoted, root, bucket, quoted, key, bucket, size,
        encode(crc), etag_of(size, crc):gsub('"', ""))
end

local function answer_resource(bucket, key, size, crc)
    ngx.header["x-goog-hash"] = "crc32c=" .. encode(crc)
    return answer(200, resource(bucket, key, size, crc), "application/json; charset=UTF-8")
end

-- Whether the body is what the client says that it is.
local function is_declared(crc)
    local told = ngx.var.http_x_goog_hash
    local declared = told and told:match("crc32c=([^,%s]+)")
    return not declared or declared == encode(crc)
end

-- --- objects -----------------------------------------------------------------------------------

local sets = dofile(HERE .. "/sets.lua")({
    answer = answer, answer_resource = answer_resource, combine = combine, encode = encode,
    etag_of = etag_of, make_directories = make_directories, measure = measure,
    object_path = object_path, refuse = refuse, state = state,
})

-- What the configuration calls.
pause, tell_composed = sets.pause, sets.tell_composed

local function recall(bucket, key)
    local size_in_set, crc_in_set = sets.recall(bucket, key)
    if size_in_set then return size_in_set, crc_in_set end
    local name = "counted " .. bucket .. "/" .. key
    local kept, path = state:get(name), object_path(bucket, key)
    -- Nobody replaces these, and they are large: measured once.
    local is_state = key:find("^state%-") ~= nil
    local size, crc = measure(not (is_state and kept) and path or "")
    if size then
        if is_state then state:set(name, ("%d %d"):format(size, crc)) end
        return size, crc
    end
    if not kept then return nil end
    size, crc = kept:match("(%S+) (%S+)")
    return tonumber(size), tonumber(crc)
end

-- Remember an object that was dropped.
local function count(bucket, key, size, crc)
    os.remove(object_path(bucket, key))
    state:set("counted " .. bucket .. "/" .. key, ("%d %d"):format(size, crc))
end

local function put_object(bucket, key)
    local path = object_path(bucket, key)
    if not path then return refuse(400, "InvalidObjectName", "no such name") end
    local fresh = UPLOADS .. "/" .. ngx.var.request_id
    local size, crc, is_kept = take_body(fresh)
    if not is_declared(crc) then
        os.remove(fresh)
        return refuse(400, "BadDigest", "the body has another crc32c")
    end
    if is_kept then
        make_directories(path)
        assert(os.rename(fresh, path))
    else
        count(bucket, key, size, crc)
    end
    return size, crc
end

-- --- uploads in parts: of the XML API by number, and of resumable uploads one after another ------

local function begin(bucket, key)
    local id = ngx.var.request_id
    ffi.C.mkdir(UPLOADS .. "/" .. id, 493)
    state:set("upload " .. id, bucket .. "/" .. key)
    return id
end

local function known(id)
    local whole = id and id:find("^%x+$") and state:get("upload " .. id)
    if not whole then return nil end
    return whole:match("^([^/]+)/(.*)$")
end

local function part_path(id, number) return ("%s/%s/%d"):format(UPLOADS, id, number) end

local function recall_part(id, number)
    local kept = state:get(("part %s %d"):format(id, number))
    if not kept then return nil end
    local size, crc, is_kept = kept:match("(%S+) (%S+) (%S+)")
    return tonumber(size), tonumber(crc), is_kept == "true"
end

local function put_part(id, number)
    local size, crc, is_kept = take_body(part_path(id, number))
    state:set(("part %s %d"):format(id, number), ("%d %d %s"):format(size, crc, tostring(is_kept)))
    return size, crc
end

local function forget(id, numbers)
    for _, number in ipairs(numbers) do
        os.remove(part_path(id, number))
        state:delete(("part %s %d"):format(id, number))
    end
    -- Parts that the client sent and does not want.
    for number = 1, tonumber(state:get("most " .. id) or 0) do
        os.remove(part_path(id, number))
        state:delete(("part %s %d"):format(id, number))
    end
    os.remove(UPLOADS .. "/" .. id)
    state:delete("most " .. id)
    state:delete("upload " .. id)
end

local function assemble(id, numbers, path)
    make_directories(path)
    if #numbers == 1 then
        assert(os.rename(part_path(id, numbers[1]), path))
        return
    end
    local fresh = UPLOADS .. "/" .. id .. ".whole"
    local out = assert(io.open(fresh, "wb"))
    for _, number in ipairs(numbers) do
        local part = assert(io.open(part_path(id, number), "rb"))
        out:write(part:read("*a"))
        part:close()
    end
    out:close()
    assert(os.rename(fresh, path))
end

-- Make one object of parts; return its size and crc32c.
local function complete(id, numbers, bucket, key)
    local size, crc, are_kept = 0, 0, true
    for _, number in ipairs(numbers) do
        local part_size, part_crc, is_kept = recall_part(id, number)
        crc = combine(crc, part_crc, part_size)
        size = size + part_size
        are_kept = are_kept and is_kept
    end
    if are_kept and size <= ASSEMBLED_BYTES then
        assemble(id, numbers, object_path(bucket, key))
    else
        count(bucket, key, size, crc)
    end
    forget(id, numbers)
    return size, crc
end

local function complete_listed(id, bucket, key)
    local numbers = {}
    for part in read_body():gmatch("<Part>(.-)</Part>") do
        local number = tonumber(part:match("<PartNumber>(%d+)</PartNumber>"))
        local etag = (part:match("<ETag>(.-)</ETag>") or ""):gsub("&quot;", '"'):gsub('"', "")
        local size, crc = recall_part(id, number or 0)
        if not size or etag ~= etag_of(size, crc):gsub('"', "") then
            return refuse(400, "InvalidPart", "a part is not what was uploaded")
        end
        numbers[#numbers + 1] = number
    end
    if #numbers == 0 then return refuse(400, "MalformedXML", "no parts are listed") end
    local size, crc = complete(id, numbers, bucket, key)
    tell(size, crc)
    local body = "<?xml version='1.0' encoding='UTF-8'?><CompleteMultipartUploadResult" .. NAMESPACE
        .. "<Bucket>%s</Bucket><Key>%s</Key><ETag>%s</ETag></CompleteMultipartUploadResult>"
    return answer(200, body:format(bucket, key, etag_of(size, crc)))
end

-- --- the XML API -------------------------------------------------------------------------------

local function xml(bucket, key, method, arguments)
    local id = arguments.uploadId
    if method == "POST" and arguments.uploads then
        local body = "<?xml version='1.0' encoding='UTF-8'?><InitiateMultipartUploadResult" .. NAMESPACE
            .. "<Bucket>%s</Bucket><Key>%s</Key><UploadId>%s</UploadId>"
            .. "</InitiateMultipartUploadResult>"
        ngx.req.discard_body()
        return answer(200, body:format(bucket, key, begin(bucket, key)))
    end
    if id then
        if known(id) ~= bucket then return refuse(404, "NoSuchUpload", "no such upload") end
        if method == "PUT" then
            local number = tonumber(arguments.partNumber)
            state:set("most " .. id, math.max(number, tonumber(state:get("most " .. id) or 0)))
            local size, crc = put_part(id, number)
            if not is_declared(crc) then
                return refuse(400, "BadDigest", "the part has another crc32c")
            end
            ngx.header["ETag"] = etag_of(size, crc)
            ngx.header["x-goog-hash"] = "crc32c=" .. encode(crc)
            return answer(200, "")
        elseif method == "POST" then
            return complete_listed(id, bucket, key)
        end
        forget(id, {})
        return answer(204, "")
    end
    if method == "DELETE" then
        if not os.remove(object_path(bucket, key) or "") then
            return refuse(404, "NoSuchKey", "no such object")
        end
        return answer(204, "")
    end
    return refuse(405, "MethodNotAllowed", "not served here")
end

-- --- the JSON API ------------------------------------------------------------------------------

local function name_in(json)
    local name = json:match('"name"%s*:%s*"(.-[^\\])"')
    return name and name:gsub("\\/", "/")
end

-- Take the media out of a multipart/related body; metadata comes first.
local function put_related(bucket, arguments)
    local boundary = (ngx.var.http_content_type or ""):match('boundary="?([^";]+)')
    if not boundary then return refuse(400, "invalid", "no boundary") end
    local body, mark = read_body(), "--" .. boundary
    local _, json_at = body:find("\r?\n\r?\n")
    local second = json_at and body:find(mark, json_at, true)
    local _, data_at = body:find("\r?\n\r?\n", second or #body)
    if not data_at then return refuse(400, "invalid", "no two parts") end
    local key = arguments.name or name_in(body:sub(json_at + 1, second - 1))
    local path = key and object_path(bucket, key)
    if not path then return refuse(400, "invalid", "no name") end
    -- The last boundary is near the end.
    local last = #body - #mark - 16
    while not body:find(mark, last, true) do last = last - 1 end
    last = body:find(mark, last, true) - 1
    if body:sub(last, last) == "\n" then last = last - 1 end
    if body:sub(last, last) == "\r" then last = last - 1 end
    make_directories(path)
    local out = assert(io.open(path, "wb"))
    out:write(body:sub(data_at + 1, last))
    out:close()
    return answer_resource(bucket, key, measure(path))
end

local function resume(id)
    local bucket, key = known(id)
    if not bucket then return refuse(404, "notFound", "no such upload") end
    local range = ngx.var.http_content_range or ""
    local first, last, total = range:match("^bytes (%d+)%-(%d+)/([%d*]+)$")
    local sent, count = tonumber(state:get("sent " .. id) or 0), state:get("most " .. id) or 0
    if not first and range ~= "" then
        total = range:match("^bytes %*/([%d*]+)$")
    elseif not first or tonumber(first) == sent then
        count = count + 1
        state:set("most " .. id, count)
        sent = sent + put_part(id, count)
        state:set("sent " .. id, sent)
    else
        return refuse(400, "invalid", "these bytes are not the next ones")
    end
    if range ~= "" and tonumber(total) ~= sent then
        if sent > 0 then ngx.header["Range"] = ("bytes=0-%d"):format(sent - 1) end
        return answer(308, "")
    end
    local numbers = {}
    for number = 1, count do numbers[number] = number end
    state:delete("sent " .. id)
    local size, crc = complete(id, numbers, bucket, key)
    -- With the last bytes the client declares what all of them are.
    if not is_declared(crc) then
        return refuse(400, "invalid", "the object has another crc32c")
    end
    return answer_resource(bucket, key, size, crc)
end

local function upload(bucket, method, arguments)
    local kind = arguments.uploadType
    if arguments.upload_id then return resume(arguments.upload_id) end
    if method ~= "POST" then return refuse(405, "invalid", "not served here") end
    if kind == "media" then
        return answer_resource(bucket, arguments.name, put_object(bucket, arguments.name))
    elseif kind == "multipart" then
        return put_related(bucket, arguments)
    end
    local key = arguments.name or name_in(read_body())
    if not key then return refuse(400, "invalid", "no name") end
    ngx.header["Location"] = ("%s://%s/upload/storage/v1/b/%s/o?uploadType=resumable&upload_id=%s")
        :format(ngx.var.scheme, ngx.var.http_host, bucket, begin(bucket, key))
    return answer(200, "")
end

local function permissions(arguments)
    local asked, quoted = arguments.permissions or {}, {}
    for _, name in ipairs(type(asked) == "table" and asked or { asked }) do
        quoted[#quoted + 1] = '"' .. name .. '"'
    end
    local body = '{"kind":"storage#testIamPermissionsResponse","permissions":[%s]}'
    return answer(200, body:format(table.concat(quoted, ",")), "application/json; charset=UTF-8")
end

local function metadata(path, method, arguments)
    local bucket, quoted = path:match("^/storage/v1/b/([^/]+)/o/(.+)/compose$")
    if bucket and method == "POST" then
        return sets.compose(bucket, ngx.unescape_uri(quoted), read_body())
    end
    bucket, quoted = path:match("^/storage/v1/b/([^/]+)/o/(.+)$")
    if bucket then
        local key = ngx.unescape_uri(quoted)
        if method == "DELETE" then
            if sets.delete(bucket, key) then return answer(204, "") end
            return refuse(404, "notFound", "No such object")
        end
        local size, crc = recall(bucket, key)
        if not size then return refuse(404, "notFound", "No such object") end
        return answer(200, resource(bucket, key, size, crc), "application/json; charset=UTF-8")
    end
    bucket = path:match("^/storage/v1/b/([^/]+)/o$")
    if bucket then return sets.list(bucket, arguments) end
    if path:match("^/storage/v1/b/[^/]+/iam/testPermissions$") then return permissions(arguments) end
    bucket = path:match("^/storage/v1/b/([^/]+)$")
    if not bucket then return refuse(404, "notFound", "Not Found") end
    local body = '{"kind":"storage#bucket","id":"%s","name":"%s","location":"LOCAL"}'
    return answer(200, body:format(bucket, bucket), "application/json; charset=UTF-8")
end

return function()
    local path = ngx.var.request_uri:match("^[^?]*")
    local method, arguments = ngx.req.get_method(), ngx.req.get_uri_args()
    local bucket = path:match("^/upload/storage/v1/b/([^/]+)/o$")
    if bucket then return upload(bucket, method, arguments) end
    if path:find("^/storage/v1/") then return metadata(path, method, arguments) end
    local key
    bucket, key = path:match("^/([^/]+)/(.+)$")
    if not bucket then return refuse(404, "NoSuchKey", "no such object") end
    return xml(bucket, ngx.unescape_uri(key), method, arguments)
end
