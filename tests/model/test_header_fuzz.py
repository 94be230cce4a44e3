"""Case 115: mutated headers by the thousand go as far as an import reads them before it writes anything.

MZD_FUZZ_EXAMPLES sets how many; 100,000 take three minutes:

    MZD_FUZZ_EXAMPLES=100000 .venv/bin/python -m pytest tests/model/test_header_fuzz.py
"""

import os
import random
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from mzd.errors import FormatError, MzdError
from mzd.formats.gguf_split import joined
from mzd.formats.model_config import model_config
from mzd.model.chat_template import ChatTemplate
from mzd.model.tokenizer import Tokenizer
from tests.formats.gguf_files import parse, tiny_llama

FIXTURES = Path(__file__).parents[1] / "fixtures"
EXAMPLES = int(os.environ.get("MZD_FUZZ_EXAMPLES", "5000"))
EXTRA_BYTES_MAX = 32 * 1024**2

# The smallest whole model, and real headers with byte pairs and with SentencePiece.
SEEDS = [tiny_llama().to_bytes()]
SEEDS += [(FIXTURES / f"{name}.gguf").read_bytes() for name in ("llama-Q4_1", "qwen2-Q4_1", "gemma3-Q4_0")]
HEADER_BYTES = [parse(data).data_offset_bytes for data in SEEDS]

INTERESTING = [0, 1, 2, 7, 9, 31, 255, 256, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1]
KINDS = ["byte", "u32", "u64", "delete", "insert", "cut"]


def mutate(data, header_bytes, mutations):
    """Change bytes in the header; sizes of the file change too."""
    changed = bytearray(data)
    for kind, where, value in mutations:
        at = int(where * min(header_bytes, len(changed)))
        if kind == "cut":
            del changed[at:]
        elif kind == "delete":
            del changed[at : at + value % 64 + 1]
        elif kind == "insert":
            changed[at:at] = bytes(value % 64)
        else:
            width = {"byte": 1, "u32": 4, "u64": 8}[kind]
            changed[at : at + width] = (value % 256**width).to_bytes(width, "little")
    return bytes(changed)


def check_tensors(file, data):
    """They lie in the file, and apart."""
    spans = sorted((t.offset_bytes, t.offset_bytes + t.size_bytes) for t in file.tensors.values())
    assert all(0 < end <= len(data) for _, end in spans)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert all(min(t.dims) > 0 and t.offset_bytes % file.alignment == 0 for t in file.tensors.values())


def check_read_or_refused(data):
    """Whatever the bytes: a model as far as its header goes, or a refusal. Returns how far it came."""
    try:
        file = parse(data)
    except FormatError:
        return "refused"
    check_tensors(file, data)
    try:
        model_config(joined([file]), None)
        tokenizer = Tokenizer.from_metadata(file.metadata)
    except FormatError:
        return "parsed"
    tokenizer.encode_prompt("Ab 1\n<s>é😀")
    with suppress(MzdError):
        ChatTemplate.from_metadata(file.metadata, tokenizer)
    return "usable"


_mutations = st.lists(
    st.tuples(st.sampled_from(KINDS), st.floats(0, 1, exclude_max=True), st.sampled_from(INTERESTING)),
    min_size=1,
    max_size=6,
)


@settings(deadline=None)
@given(st.sampled_from(range(len(SEEDS))), _mutations)
@example(0, [("u64", 8 / HEADER_BYTES[0], 2**64 - 1)])
def test_case_115_mutated_headers_are_read_or_refused(which, mutations):
    check_read_or_refused(mutate(SEEDS[which], HEADER_BYTES[which], mutations))


def random_header(seed):
    """(what it is made of, the file)"""
    rng = random.Random(seed)
    which = 0 if rng.random() < 0.8 else rng.randrange(len(SEEDS))
    mutations = [(rng.choice(KINDS), rng.random(), rng.choice(INTERESTING)) for _ in range(rng.randint(1, 6))]
    return (which, mutations), mutate(SEEDS[which], HEADER_BYTES[which], mutations)


def resident_bytes(field):
    """A line of /proc/self/status, such as `VmRSS`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def test_case_115_many_mutated_headers_cost_little():
    """The same without hypothesis, which is slow in numbers; the peak of the resident set is the kernel's."""
    for data in SEEDS:
        assert check_read_or_refused(data) == "usable"  # and all code is loaded
    with suppress(OSError):  # not every kernel lets the peak begin anew
        Path("/proc/self/clear_refs").write_text("5")
    before_bytes = resident_bytes("VmHWM")
    reached = dict.fromkeys(("refused", "parsed", "usable"), 0)
    for seed in range(EXAMPLES):
        made_of, data = random_header(seed)
        try:
            reached[check_read_or_refused(data)] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}: {made_of}") from error
    assert min(reached.values()) > EXAMPLES / 100, reached  # mutations are neither too gentle nor too coarse
    assert resident_bytes("VmHWM") - before_bytes < EXTRA_BYTES_MAX
