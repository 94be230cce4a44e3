"""Huge pages: whether there are any, and that they can be kept out of a range."""

import ctypes

import pytest

from mzd.memory.huge_pages import forbid_huge_pages, has_huge_pages

HUGE = 2 << 20


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("always [madvise] never\n", True),
        ("[always] madvise never\n", True),
        ("always madvise [never]\n", False),
    ],
)
def test_huge_pages_as_the_system_says(tmp_path, text, expected):
    path = tmp_path / "enabled"
    path.write_text(text)
    assert has_huge_pages(path) is expected


def test_a_kernel_without_the_file_has_no_huge_pages(tmp_path):
    assert has_huge_pages(tmp_path / "missing") is False


def test_one_touched_page_is_one_resident_page(reserve, resident_bytes):
    start = -(-reserve(3 * HUGE).address // HUGE) * HUGE
    forbid_huge_pages(start, HUGE)
    ctypes.memset(start, 1, 1)
    assert resident_bytes(start, HUGE) == 4096
