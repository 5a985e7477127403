-- Sets of many objects of one size, which are told of by arithmetic: of `102400x20000/` the keys are
-- `102400x20000/0000000.bin` to `102400x20000/0019999.bin`, and all have the bytes of the one file
-- `102400/0`. A page of a listing is a template with the numbers written into it, 0.1 us for an
-- object, so that the server is no bound of a client that parses it.

local ffi = require "ffi"

ffi.cdef "int link(const char *path, const char *other);"

local DIGITS = 7
local DEFAULT_PAGE, MAX_PAGE = 1000, 5000
local MARK = ("\1"):rep(DIGITS)
local TIME = "2026-01-01T00:00:00.000Z"
local FIELDS = { "kind", "id", "selfLink", "mediaLink", "name", "bucket", "generation",
    "metageneration", "contentType", "storageClass", "size", "crc32c", "etag", "timeCreated",
    "updated" }
local MAX_KEPT = 64 -- templates, and files of composites
local COMPOSED = DIRECTORY .. "/composed"

return function(kit)
    local Sets = {}
    local answer, refuse, encode = kit.answer, kit.refuse, kit.encode
    local measure, object_path, state = kit.measure, kit.object_path, kit.state

    -- Return a set's prefix, its size in bytes and its number of objects, and what follows.
    local function parse(key)
        local prefix, size, count, rest = key:match("^((%d+)x(%d+)/)(.*)$")
        if not prefix then return nil end
        return { prefix = prefix, size = tonumber(size), count = tonumber(count) }, rest
    end

    local function name_of(set, index) return ("%s%07d.bin"):format(set.prefix, index) end

    local crcs = {}

    local function crc_of(bucket, size)
        if not crcs[size] then
            local _, crc = measure(object_path(bucket, size .. "/0"))
            crcs[size] = crc
        end
        return crcs[size]
    end

    -- Return size and crc32c of an object of a set; nil where there is none.
    function Sets.recall(bucket, key)
        local set, rest = parse(key)
        local index = set and tonumber(rest:match("^(%d%d%d%d%d%d%d)%.bin$"))
        local crc = index and index < set.count and crc_of(bucket, set.size)
        if crc then return set.size, crc end
    end

    -- --- listings -------------------------------------------------------------------------------

    -- Return the index of the first key of a set that is not below a text.
    local function first_from(set, text)
        local low, high = 0, set.count
        while low < high do
            local middle = math.floor((low + high) / 2)
            if name_of(set, middle) < text then low = middle + 1 else high = middle end
        end
        return low
    end

    -- Return what writes pages of so many copies of a text, each with a number at its marks.
    local function writer(text)
        local marks, at = {}, 0
        while true do
            at = text:find(MARK, at + 1, true)
            if not at then break end
            marks[#marks + 1] = at - 1
        end
        local buffer = ffi.new("uint8_t[?]", #text * MAX_PAGE)
        for row = 0, MAX_PAGE - 1 do ffi.copy(buffer + row * #text, text, #text) end
        return function(first, count)
            for row = 0, count - 1 do
                local number, base = first + row, row * #text
                for digit = DIGITS - 1, 0, -1 do
                    local rest = math.floor(number / 10)
                    local byte = 48 + number - rest * 10
                    for mark = 1, #marks do buffer[base + marks[mark] + digit] = byte end
                    number = rest
                end
            end
            return ffi.string(buffer, math.max(0, count * #text - 1)) -- without the last comma
        end
    end

    local function values_of(bucket, set)
        local root = ("%s://%s"):format(ngx.var.scheme, ngx.var.http_host)
        local key = set.prefix .. MARK .. ".bin"
        local quoted = ngx.escape_uri(set.prefix) .. MARK .. ".bin"
        local crc = crc_of(bucket, set.size) or 0
        return {
            kind = "storage#object",
            id = ("%s/%s/1"):format(bucket, key),
            selfLink = ("%s/storage/v1/b/%s/o/%s"):format(root, bucket, quoted),
            mediaLink = ("%s/download/storage/v1/b/%s/o/%s?generation=1&alt=media")
                :format(root, bucket, quoted),
            name = key,
            bucket = bucket,
            generation = "1",
            metageneration = "1",
            contentType = "application/octet-stream",
            storageClass = "STANDARD",
            size = ("%d"):format(set.size),
            crc32c = encode(crc),
            etag = kit.etag_of(set.size, crc):gsub('"', ""),
            timeCreated = TIME,
            updated = TIME,
        }
    end

    local kept, num_kept = {}, 0

    local function keep(tag, make)
        if not kept[tag] then
            if num_kept >= MAX_KEPT then kept, num_kept = {}, 0 end
            kept[tag], num_kept = writer(make()), num_kept + 1
        end
        return kept[tag]
    end

    local function json_writer(bucket, set, mask)
        return keep(("json %s %s %s"):format(bucket, set.prefix, mask), function()
            local wanted = mask:match("items(%b())")
            local values, words = values_of(bucket, set), {}
            for _, field in ipairs(FIELDS) do
                if not wanted or wanted:find("[(,]" .. field .. "[,)]") then
                    words[#words + 1] = ('"%s":"%s"'):format(field, values[field])
                end
            end
            return "{" .. table.concat(words, ",") .. "},"
        end)
    end

    -- Return the set that is asked for, and from which index to which its keys are.
    local function span(prefix, start_text, end_text)
        local set = parse(prefix)
        if not set then return nil end
        local first = math.max(first_from(set, prefix), first_from(set, start_text))
        local last = first_from(set, prefix .. ("\255"):rep(4))
        if end_text ~= "" then last = math.min(last, first_from(set, end_text)) end
        return set, first, math.max(first, last)
    end

    -- Answer a page of the JSON API. A key of a set holds no "/" but the one of its prefix.
    function Sets.list(bucket, arguments)
        local function text(name)
            local value = arguments[name]
            return type(value) == "string" and value or ""
        end
        local token = text("pageToken")
        local start = token ~= "" and ngx.decode_base64(token) or text("startOffset")
        local set, first, last = span(text("prefix"), start, text("endOffset"))
        local parts = { '{"kind":"storage#objects"' }
        if set and first < last then
            local size = math.min(tonumber(text("maxResults")) or DEFAULT_PAGE, MAX_PAGE)
            local upto = math.min(last, first + size)
            if upto < last then
                local next_token = ngx.encode_base64(name_of(set, upto))
                parts[#parts + 1] = (',"nextPageToken":"%s"'):format(next_token)
            end
            parts[#parts + 1] = ',"items":['
            parts[#parts + 1] = json_writer(bucket, set, text("fields"))(first, upto - first)
            parts[#parts + 1] = "]"
        end
        parts[#parts + 1] = "}"
        return answer(200, table.concat(parts), "application/json; charset=UTF-8")
    end

    -- --- composites -----------------------------------------------------------------------------

    -- Return the file of so many objects of one size, end to end; made once and linked after that.
    local function composed_path(bucket, size, count)
        local path = ("%s/%dx%d"):format(COMPOSED, size, count)
        local done = io.open(path, "rb")
        if done then
            done:close()
            return path
        end
        ffi.C.mkdir(COMPOSED, 493)
        local source = assert(io.open(object_path(bucket, size .. "/0"), "rb"))
        local data = source:read("*a")
        source:close()
        local target = assert(io.open(path .. ".new", "wb"))
        for _ = 1, count do target:write(data) end
        target:close()
        assert(os.rename(path .. ".new", path))
        return path
    end

    -- Compose objects of one size, all of sets.
    function Sets.compose(bucket, key, body)
        local sources = body:match('"sourceObjects"%s*:%s*(%b[])') or ""
        local size, crc, count = nil, 0, 0
        for name in sources:gmatch('"name"%s*:%s*"(.-)"') do
            local name_size, name_crc = Sets.recall(bucket, (name:gsub("\\/", "/")))
            if not name_size then return refuse(404, "notFound", "No such object: " .. name) end
            if size and size ~= name_size then
                return refuse(400, "invalid", "only objects of one size are composed here")
            end
            size, count = name_size, count + 1
            crc = kit.combine(crc, name_crc, size)
        end
        if count == 0 or count > 32 then return refuse(400, "invalid", "1 to 32 sources") end
        local path = object_path(bucket, key)
        kit.make_directories(path)
        os.remove(path)
        if ffi.C.link(composed_path(bucket, size, count), path) ~= 0 then
            return refuse(503, "backendError", "could not link " .. key)
        end
        state:set("composed " .. key, encode(crc))
        return kit.answer_resource(bucket, key, size * count, crc)
    end

    -- Say what a composite's bytes are, among the headers of a read.
    function Sets.tell_composed(key)
        local crc = state:get("composed " .. key)
        if crc then ngx.header["x-goog-hash"] = "crc32c=" .. crc end
    end

    -- Delete an object; return whether there was one.
    function Sets.delete(bucket, key)
        state:delete("composed " .. key)
        return os.remove(object_path(bucket, key) or "")
    end

    -- --- the network ----------------------------------------------------------------------------

    -- Wait for the latency, and where connections are paced for the time of the first piece: nginx
    -- sends that at once, and waits only between pieces.
    function Sets.pause()
        local seconds = LATENCY_SECONDS
        local size = RATE > 0 and tonumber(ngx.var.uri:match("^/[^/]+/(%d+)[x/]"))
        if size and ngx.req.get_method() == "GET" then
            local from, to = (ngx.var.http_range or ""):match("^bytes=(%d+)%-(%d+)$")
            if from then size = math.min(size, to - from + 1) end
            seconds = seconds + math.min(size, PIECE_BYTES) / RATE
        end
        if seconds > 0 then ngx.sleep(seconds) end
    end

    return Sets
end
