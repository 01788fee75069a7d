"""Where files are: on this machine (a Path) or elsewhere (a Uri). Nothing is opened here."""

import re
from pathlib import Path, PurePath
from typing import Any, TypeGuard
from urllib.parse import unquote, urlsplit

from prefill_cli.errors import UsageError

SCHEMES = ("s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs", "hf")


class Uri(str):
    """A place on another system, like s3://bucket/key."""


Place = Path | Uri


def is_uri(place: object) -> TypeGuard[Uri]:
    return isinstance(place, Uri)


def local(place: Place) -> Path:
    """A place that is on this machine; one elsewhere was to be fetched before it came here."""
    assert isinstance(place, Path), place
    return place


def place(text: str) -> Place:
    """What a user means by a path, a file:// URI or another URI.

    Raises:
        UsageError: an unknown scheme, a host in a file:// URI, credentials in a URI.
    """
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]+)://", text)
    if not scheme:
        return Path(text)
    if scheme[1].lower() not in (*SCHEMES, "file"):
        named = re.sub("//[^/]*@", "//…@", text)  # there may be a password in it
        raise UsageError(f"{named}: {scheme[1]}:// is not one of file, {', '.join(SCHEMES)}")
    host = urlsplit(text).netloc
    if scheme[1].lower() == "file":
        if host not in ("", "localhost"):
            raise UsageError(f"{text}: {host!r} stands where the host does; a path on this machine is file:///path")
        return Path(unquote(urlsplit(text).path))
    if "@" in host and scheme[1].lower() in ("s3", "gs", "gcs") and not host.startswith("anonymous@"):
        raise UsageError(f"{scheme[1]}://…: credentials do not belong in a URI; set them in the environment or a profile")
    return Uri(text)


def result_name(first_input: Place, suffix: str = ".topk") -> str:
    """The name that a result gets where --output is not given."""
    bare = PurePath(first_input.partition("?")[0]) if isinstance(first_input, Uri) else first_input.resolve()
    return bare.stem + suffix


def beside(folder: Place, *names: str) -> Any:
    """A place inside a folder; a Uri's query stays."""
    if isinstance(folder, Path):
        return folder.joinpath(*names)
    bare, mark, query = folder.partition("?")
    return Uri("/".join((bare.rstrip("/"), *names)) + mark + query)
