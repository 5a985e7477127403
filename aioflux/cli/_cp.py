"""`aioflux cp`: objects from anywhere to anywhere.

`cp` is over 60 lines by its options and its help.
"""

from __future__ import annotations

from typing import Annotated

import typer

from aioflux.cli._event_loop import run
from aioflux.cli._location import Access, Anonymous, Endpoint, check_places, parse_place

__all__ = ["cp"]


def cp(
    sources: Annotated[
        list[str], typer.Argument(metavar="SOURCE...", help="Uris, paths, or - for stdin.")
    ],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Uri, path, or - for stdout.")],
    *,
    recursive: Annotated[
        bool, typer.Option("-r", "--recursive", help="Copy what is below SOURCE, which is one.")
    ] = False,
    no_clobber: Annotated[
        bool, typer.Option("--no-clobber", "-n", help="Leave what exists as it is.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be copied, and copy nothing.")
    ] = False,
    endpoint_url: Endpoint = None,
    anonymous: Anonymous = False,
) -> int:
    """Copy objects and files; names follow "aws s3 cp".

    TARGET is a directory if it ends in "/", is a bucket, or is a local directory that exists: the
    copy keeps the last segment of its name there. Otherwise TARGET is the new name. Standard
    output takes several SOURCEs one after the other.

    With -r, what is below SOURCE lands below TARGET, with the same names, whether or not either
    ends in "/": "cp -r dir gs://b/p" makes "gs://b/p/..." of "dir/...". An empty object whose key
    ends in "/" becomes a directory; empty directories are not copied.

    What cannot be copied is an error, and does not keep the others: links to directories, which
    are not followed, and what is no regular file, such as a pipe; a key that would leave a local
    TARGET ("..", "/...", through a link in it), or that needs a directory where another is a file;
    a name at TARGET that is below SOURCE. The exit status is then 1.

    Copies replace what exists, and appear whole or not at all; a local file that is replaced keeps
    its mode. The bytes of objects are compared with their crc32c where they are read and where
    they are stored. Within a bucket, all of their metadata goes along. To another bucket, content
    type and custom metadata do, and cache control, content disposition, content language and
    storage class do not.
    """
    if recursive and (len(sources) > 1 or sources == ["-"]):
        raise typer.BadParameter("-r takes one SOURCE, which is not standard input")
    if sources.count("-") > 1:
        raise typer.BadParameter("standard input can be read once")
    from aioflux.cli._copy import Copy
    from aioflux.cli._copy_sources import Target

    origins = [None if text == "-" else parse_place(text) for text in sources]
    places = [place for place in origins if place is not None]
    goal = None if target == "-" else parse_place(target)
    access = Access(endpoint_url, anonymous)
    check_places([*places, *([goal] if goal else [])], access)
    named = Target(goal, goal is not None and (recursive or goal.is_directory()))
    if len(sources) > 1 and goal is not None and not named.is_directory:
        raise typer.BadParameter('with several SOURCEs, TARGET is a directory: end it in "/"')
    if None in origins and named.is_directory:
        raise typer.BadParameter(
            "standard input has no name: let TARGET be one, without a / at its end"
        )
    if goal is None and recursive:
        raise typer.BadParameter("-r does not go to standard output")

    async def work() -> int:
        async with Copy(named, access, no_clobber=no_clobber, dry_run=dry_run) as copy:
            if recursive:
                await copy.below(places[0])
            else:
                await copy.each(origins)
        return copy.finish()

    return run(work)
