"""The provenance of a result: versions, device and digests of files, so that numbers can be
traced and stale ones found."""

from __future__ import annotations

import datetime
import hashlib
import importlib
import importlib.metadata
import json
import os
import platform
import sys
from dataclasses import is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvjax.validation import parts_of

if TYPE_CHECKING:
    from kvjax.policies import PerLayer

LIBRARIES = ("jax", "jaxlib", "flax", "transformers", "numpy", "kvjax")


def provenance() -> dict[str, Any]:
    """Date, versions and device, for the head of a result; JSON.

    >>> sorted(provenance())
    ['backend', 'date', 'device', 'devices', 'machine', 'python', 'source', 'versions']
    """
    import jax

    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {name: importlib.metadata.version(name) for name in LIBRARIES},
        "source": source_digest(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "backend": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
    }


def read_text(path: Path, *, what: str) -> str:
    """Reads a UTF-8 file.

    Raises:
      FileNotFoundError: there is no such file; `what` says what to give.
      ValueError: the file is not UTF-8.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there; {what}")
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start}); {what}") from None


def digest(path: str | Path) -> str:
    """SHA-256 of a file's bytes."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Config, weights, tokenizer and templates.
MODEL_FILES = (
    ".json",
    ".safetensors",
    ".model",
    ".txt",
    ".jinja",
)


def model_digest(directory: str | Path) -> str:
    """SHA-256 of the files of a checkpoint that decide what it answers; its README is not one
    of them.
    """
    files = sorted(
        file
        for file in Path(directory).iterdir()
        if file.is_file() and file.suffix in MODEL_FILES
    )
    if not files:
        raise FileNotFoundError(f"{directory}: there is no checkpoint")
    return digest_json(
        {file.name: digest(file) for file in files if not file.name.startswith(".")}
    )


def digest_json(value: Any) -> str:
    """SHA-256 of a JSON value, whatever the order of its keys.

    >>> digest_json({"a": 1, "b": [2, 3]}) == digest_json({"b": (2, 3), "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def json_text(value: Any, *, indent: int | None = None) -> str:
    """A value as JSON, with a final newline; numbers that are not finite become null, as JSON
    does not have them.

    >>> json_text({"mean": float("nan")})
    '{"mean": null}\\n'
    """
    known = json.loads(json.dumps(value), parse_constant=lambda _: None)
    return json.dumps(known, indent=indent) + "\n"


def replace_file(path: Path, text: str) -> None:
    """Writes a file atomically: a run killed at any moment leaves the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def own_digest(policies: PerLayer | None) -> str:
    """The digest of the files that define a user's own parts of policies, and of those beside
    them that they import; empty if all parts are kvjax's.

    A part's repr does not change when its code does. Parts that no file defines, such as those of
    a notebook, are known by their repr alone.
    """
    from kvjax.presets.loading import files_of

    files = set()
    layers = () if policies is None else (*policies.first, policies.rest)
    for part in (part for policy in layers for part in parts_of(policy)):
        outside = is_dataclass(part) and type(part).__module__.partition(".")[0] != "kvjax"
        module = sys.modules.get(type(part).__module__) if outside else None
        found = files_of(type(part)) if outside else []
        if not found and (file := getattr(module, "__file__", None)) is not None:
            found = [Path(file)]
        files |= {digest(file) for file in found if file.is_file()}
    return digest_json(sorted(files)) if files else ""


def source_digest() -> str:
    """The digest of the Python files of kvjax that decide what is decoded: all but the command
    line and the evaluation itself.

    The version number alone does not identify code that is being edited.
    """
    digests = {}
    # These may be in separate folders.
    for package in (
        "kvjax",
        "kvjax.models",
        "kvjax.kernels_pallas",
    ):
        (folder,) = map(Path, importlib.import_module(package).__path__)
        for file in sorted(folder.rglob("*.py")):
            name = f"{package.replace('.', '/')}/{file.relative_to(folder).as_posix()}"  # as in a wheel
            if not name.startswith(("kvjax/cli", "kvjax/evaluate")):
                digests[name] = digest(file)
    return digest_json(digests)
