"""A file is written whole or not at all: a full disk or a kill leaves the old one as it was."""

import os
from pathlib import Path

import torch

from toy_tasks import UserError


def replace_file(path: Path, content: str | bytes) -> None:
    """Write a text (UTF-8) or bytes. Raises OSError."""
    partial = _partial(path)
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def save_tensors(state: dict, path: Path) -> None:
    """torch.save of tensors and plain values, so that loading them runs no code. Raises UserError."""
    partial = _partial(path)
    try:
        torch.save(state, partial)
        partial.replace(path)
    except (OSError, RuntimeError) as error:  # PyTorch reports a full disk as a RuntimeError
        partial.unlink(missing_ok=True)
        raise UserError(f"{path} cannot be written ({' '.join(str(error).split())[:80]})") from None


def _partial(path: Path) -> Path:
    """Where a file grows before it gets its name."""
    return path.with_name(f"{path.name}.{os.getpid()}.partial")
