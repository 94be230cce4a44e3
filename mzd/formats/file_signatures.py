"""Owns guessing what a file is that is not what it should be, so that an error can say it."""

from __future__ import annotations

HEAD_BYTES = 64  # what `looks_like` wants to see

_PREFIXES = (
    (b"PK\x03\x04", "a zip archive (a Python wheel, or a PyTorch checkpoint)"),
    (b"\x1f\x8b", "gzip data"),
    (b"\x28\xb5\x2f\xfd", "zstd data"),
    (b"\x80\x02", "a pickled PyTorch checkpoint"),
    (b"FUGG", "a big-endian GGUF file"),
    (b"lmgg", "a GGML file, a format before GGUF"),
    (b"fmgg", "a GGMF file, a format before GGUF"),
    (b"tjgg", "a GGJT file, a format before GGUF"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file that it points to"),
    (b"MZDWGHT\x00", "a weight store of mzd, made from a GGUF file"),
)


def looks_like(head: bytes) -> str:
    """Name what a file with these first bytes (up to `HEAD_BYTES`) probably is."""
    if not head:
        return "an empty file"
    for prefix, kind in _PREFIXES:
        if head.startswith(prefix):
            return kind
    if head[8:9] == b"{":  # u64 length of the header, then the header in JSON
        return "a safetensors file"
    return _text_kind(head.lstrip(b"\xef\xbb\xbf \t\r\n"))


def _text_kind(text: bytes) -> str:
    if text.startswith((b"{", b"[")):
        return "JSON"
    if text[:14].lower().startswith((b"<!doctype html", b"<html", b"<head")):
        return "an HTML page"
    if text.startswith(b"<"):
        return "XML or HTML"
    if not any(text):
        return "nothing but zeros: an unfinished download"
    return "some other kind of file"
