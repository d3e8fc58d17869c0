"""Whether a folder takes what is to be saved in it: found out before anything is computed, and nothing is left of the trial."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

from .config import check_named, home
from .errors import ConfigError

_ALLOWED = "must be a folder that can be written, or a name where one can be made"


def named_folder(path: Any, field: str = "path") -> Path:
    """The absolute path, ``~`` resolved, whether it can be written or not. Raises ConfigError that names ``field``."""
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(field, path, _ALLOWED)
    check_named(path, field, _ALLOWED)
    return home(Path(path), field).absolute()


def folder_to_write(path: Any, field: str = "path") -> Path:
    """The absolute path, ``~`` resolved. Raises ConfigError that names ``field`` where no file can be put there; on this machine."""
    target = named_folder(path, field)
    made: list[Path] = []
    try:
        for folder in [*reversed(target.parents), target]:
            if not folder.exists():
                folder.mkdir()
                made.append(folder)
        with tempfile.TemporaryFile(dir=target):
            pass
    except (OSError, ValueError) as error:  # ValueError: a NUL in it
        why = error.strerror if isinstance(error, OSError) else str(error)
        why = "it is a file" if isinstance(error, NotADirectoryError) and target.is_file() else why
        raise ConfigError(field, str(path), f"{_ALLOWED}: {why}") from None
    finally:
        for folder in reversed(made):
            with contextlib.suppress(OSError):  # somebody else put something there meanwhile
                folder.rmdir()
    return target
