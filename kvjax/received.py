"""JSON files of other people: read as data, within limits, with the file's name in each error."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 28  # several times the largest index, and results of long runs


def read_object(path: str | Path, *, cure: str = "download it again") -> dict[str, Any]:
    """The JSON object in a file. `cure` ends each error message.

    Raises:
      FileNotFoundError: no such file.
      ValueError: a folder, pipe or device, a file too large, text that is not UTF-8 or not
        JSON, brackets too deep or numbers too long to be read, or JSON that is no object.
    """
    path = Path(path)
    try:
        about = path.stat()
    except (OSError, ValueError) as error:  # a null byte in the name
        raise FileNotFoundError(
            f"{path} does not exist or cannot be read ({error}); {cure}"
        ) from None
    if not stat.S_ISREG(about.st_mode):
        raise ValueError(f"{path} is no regular file; {cure}")
    if about.st_size > MOST_BYTES:
        raise ValueError(f"{path} has {about.st_size} bytes, too many for its purpose; {cure}")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); {cure}") from error
    except RecursionError:
        raise ValueError(f"{path} nests brackets too deeply; {cure}") from None
    except ValueError:
        raise ValueError(
            f"{path} has a number of more digits than Python reads; {cure}"
        ) from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(found).__name__}; {cure}")
    return found
