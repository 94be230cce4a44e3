"""The index of the weight store: exact round trip, aligned extents, and nothing believed that was damaged."""

import hashlib
from dataclasses import asdict, replace

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mzd.errors import FormatError
from mzd.formats import weight_store as store
from mzd.formats.architectures import ARCHITECTURES
from mzd.formats.ggml_types import SUPPORTED_TYPES, GgmlType
from mzd.formats.layer_config import LayerConfig, RopeConfig
from mzd.formats.model_config import ModelConfig

TYPES = [type for type in sorted(SUPPORTED_TYPES) if type.block_weights <= 32]  # of the rows drawn here
SHA256 = "ab" * 32


@st.composite
def configs(draw):
    head_dim = draw(st.sampled_from([16, 32, 64]))
    kv_heads = draw(st.integers(1, 3))
    factors = st.lists(st.floats(0.5, 64), min_size=head_dim // 2, max_size=head_dim // 2).map(tuple)
    ropes = st.builds(RopeConfig, st.just("pairs"), st.floats(1, 1e7), st.just(head_dim), st.none() | factors)
    layers = st.builds(LayerConfig, st.none() | st.integers(1, 9999), st.none() | st.integers(0, 1))
    caps = st.none() | st.floats(1, 100)
    num_layers = draw(st.integers(1, 4))
    return ModelConfig(
        architecture=draw(st.sampled_from(sorted(ARCHITECTURES))),
        name=draw(st.text(max_size=20)),
        num_layers=num_layers,
        hidden_size=32 * draw(st.integers(1, 5)),
        ffn_size=32 * draw(st.integers(1, 5)),
        num_heads=kv_heads * 2,  # q is a multiple of 32 whatever the head_dim
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=draw(st.integers(1, 50)),
        context_length=draw(st.integers(1, 2**31 - 1)),
        rms_eps=draw(st.floats(1e-7, 1e-3)),
        ropes=tuple(draw(st.lists(ropes, min_size=2, max_size=2))),
        layers=tuple(draw(st.lists(layers, min_size=num_layers, max_size=num_layers))),
        attention_scale=draw(st.floats(0.01, 1)),
        attention_softcap=draw(caps),
        logit_softcap=draw(caps),
        embedding_scale=draw(st.floats(1, 100)),
        tied_output=draw(st.booleans()),
    )


_scalars = st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=8)
_tokenizers = st.dictionaries(
    st.text(max_size=8).map("tokenizer.".__add__),
    _scalars | st.lists(st.text(max_size=4)).map(tuple) | st.lists(st.floats(allow_nan=False)).map(tuple),
    max_size=4,
)


@st.composite
def indexes(draw):
    config = draw(configs())
    end = store.HEADER_BYTES
    units = []
    for number in range(config.num_layers + 1):
        plan_unit = store.plan_layer if number < config.num_layers else store.plan_head
        plan = plan_unit(config, lambda rule: draw(st.sampled_from(TYPES)), end)
        units.append(plan.with_checksum(draw(st.integers(0, 2**32 - 1))))
        end = plan.end_bytes
    *layers, head = units
    source = store.SourceFile(draw(st.text(max_size=8)), draw(st.integers(0, 2**40)), SHA256)
    identity = store.model_id(SHA256)
    tokenizer = draw(_tokenizers)
    return store.StoreIndex(store.FORMAT_VERSION, identity, config, tuple(layers), head, source, tokenizer)


def placed(encoded, index):
    """Where the index of a store lies that holds nothing but what it must."""
    offset = index.head.offset_bytes + index.head.size_bytes
    return store.decode_header(store.encode_header(offset, encoded), offset + len(encoded))


def redone(index, change):
    """Decode an index whose fields were changed by someone who can compute a checksum."""
    fields = msgpack.unpackb(store.encode_index(index), use_list=False)
    change(fields)
    encoded = msgpack.packb(fields)
    return store.decode_index(encoded, placed(encoded, index))


@settings(max_examples=50, deadline=None)
@given(indexes())
def test_an_index_comes_back_as_it_was(index):
    encoded = store.encode_index(index)
    assert store.decode_index(encoded, placed(encoded, index)) == index


@settings(max_examples=50, deadline=None)
@given(indexes())
def test_extents_follow_each_other_and_are_aligned(index):
    end = store.HEADER_BYTES
    for unit in (*index.layers, index.head):
        assert unit.offset_bytes == end
        assert unit.offset_bytes % 4096 == unit.size_bytes % 4096 == 0
        end += unit.size_bytes
        inside = 0
        for tensor in unit.tensors:
            assert tensor.offset_bytes % 64 == 0
            assert inside <= tensor.offset_bytes < inside + 64
            inside = tensor.offset_bytes + tensor.size_bytes
        assert inside <= unit.size_bytes < inside + 4096


def example_index(**changes):
    config = ModelConfig(
        architecture="llama",
        name="x",
        num_layers=2,
        hidden_size=32,
        ffn_size=64,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        vocab_size=40,
        context_length=128,
        rms_eps=1e-5,
        ropes=(RopeConfig("pairs", 1e4, 16, None),),
        layers=(LayerConfig(window=None, rope=0), LayerConfig(window=64, rope=None)),
        attention_scale=0.25,
        attention_softcap=50.0,
        logit_softcap=None,
        embedding_scale=1.0,
        tied_output=True,
    )
    first = store.plan_layer(config, lambda _: GgmlType.Q8_0, store.HEADER_BYTES)
    second = store.plan_layer(config, lambda _: GgmlType.Q4_1, first.end_bytes)
    head = store.plan_head(config, lambda _: GgmlType.F16, second.end_bytes)
    index = store.StoreIndex(
        store.FORMAT_VERSION,
        store.model_id(SHA256),
        config,
        (first.with_checksum(1), second.with_checksum(2)),
        head.with_checksum(3),
        store.SourceFile("x.gguf", 5, SHA256),
        {"tokenizer.ggml.tokens": ("a", "b"), "tokenizer.ggml.add_bos_token": True},
    )
    return replace(index, **changes)


def test_vectors_are_plain_and_matrices_in_order_of_use():
    layer = example_index().layers[0]
    assert [tensor.role for tensor in layer.tensors] == [
        "attn_norm",
        "attn_q",
        "attn_k",
        "attn_v",
        "attn_output",
        "ffn_norm",
        "ffn_gate",
        "ffn_up",
        "ffn_down",
    ]
    norm, down = layer.tensor("attn_norm"), layer.tensor("ffn_down")
    assert (norm.type, norm.rows, norm.cols, norm.size_bytes) == (GgmlType.F32, 1, 32, 128)
    assert (down.type, down.rows, down.cols) == (GgmlType.Q8_0, 32, 64)
    assert layer.has("attn_q")
    assert not layer.has("output")
    with pytest.raises(FormatError, match="'output'"):
        layer.tensor("output")


def test_the_identity_depends_on_source_and_layout(monkeypatch):
    first = store.model_id(SHA256)
    assert first != store.model_id("cd" * 32)
    monkeypatch.setattr(store, "LAYOUT_VERSION", store.LAYOUT_VERSION + 1)
    assert store.model_id(SHA256) != first


def test_a_header_of_another_version_is_told_from_a_damaged_one():
    header = bytearray(store.encode_header(4096, b"index"))
    assert len(header) == store.HEADER_BYTES
    for at in (8, 12):  # format, layout
        other = bytearray(header)
        other[at] += 1
        with pytest.raises(store.StoreVersionError) as caught:
            store.decode_header(bytes(other), 5000)
        assert caught.value.code == "weights_unavailable"
        assert "made anew" in caught.value.message


@pytest.mark.parametrize("size", [0, 1, 8, 63])
def test_short_files_and_other_files_are_no_store(size):
    header = store.encode_header(4096, b"index")
    for block in (header[:size], b"GGUF" + bytes(4092), bytes(4096)):
        with pytest.raises(FormatError, match="damaged weight store") as caught:
            store.decode_header(block, len(block))
        assert not isinstance(caught.value, store.StoreVersionError)
        assert caught.value.code == "weights_unavailable"


def test_an_index_outside_the_file_is_refused_before_it_is_read():
    header = store.encode_header(4096, b"index")
    assert store.decode_header(header, 4101).size_bytes == 5
    for file_bytes in (4096, 4100):
        with pytest.raises(FormatError, match="index ends at byte 4101"):
            store.decode_header(header, file_bytes)
    huge = bytearray(header)
    huge[24:32] = (store.INDEX_BYTES_MAX + 1).to_bytes(8, "little")
    with pytest.raises(FormatError, match="index ends"):
        store.decode_header(bytes(huge), 2**60)


@given(st.data())
def test_any_flipped_byte_of_the_index_is_noticed(data):
    index = example_index()
    encoded = bytearray(store.encode_index(index))
    place = placed(bytes(encoded), index)
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(FormatError, match="checksum"):
        store.decode_index(bytes(encoded), place)


@given(st.binary(max_size=60) | (_scalars | st.none() | st.lists(_scalars, max_size=4)).map(msgpack.packb))
def test_any_bytes_with_a_right_checksum_are_refused(data):
    place = store.IndexPlace(4096, len(data), hashlib.sha256(data).digest())
    with pytest.raises(FormatError, match="damaged weight store"):
        store.decode_index(data, place)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(
        [*asdict(example_index().config), "ropes.base", "ropes.freq_factors", "layers.window", "layers.rope"]
    ),
    _scalars | st.none(),
)
def test_a_forged_config_is_a_right_one_or_refused(field, value):
    index = example_index()

    def forge(fields):
        config = fields["config"]
        part, _, inner = field.partition(".")
        if inner:
            config[part][0][inner] = value
        else:
            config[field] = value

    try:
        forged = redone(index, forge)
    except FormatError:
        return
    end = forged.head.offset_bytes + forged.head.size_bytes
    assert end <= index.head.offset_bytes + index.head.size_bytes  # no unit is placed outside the file


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields.pop("head"),
        lambda fields: fields.update(layers=fields["layers"][:1]),
        lambda fields: fields.update(layers=fields["layers"] * 2),
        lambda fields: fields.update(layers=(None, None)),
        lambda fields: fields.update(model_id="00" * 32),
        lambda fields: fields["head"].update(crc32c="3"),
        lambda fields: fields["head"].update(types={}),
        lambda fields: fields["head"]["types"].update(token_embd=250),
        lambda fields: fields["head"]["types"].update(token_embd=int(GgmlType.Q2_K)),
        lambda fields: fields["head"]["types"].update(token_embd=int(GgmlType.F32)),
        lambda fields: fields["source"].update(sha256=None),
        lambda fields: fields.update(tokenizer={"tokenizer.x": {}}),
        lambda fields: fields.update(tokenizer={"tokenizer.x": (("nested",),)}),
        lambda fields: fields.update(tokenizer={1: "x"}),
    ],
)
def test_a_forged_index_is_refused(change):
    assert redone(example_index(), lambda fields: None) == example_index()
    with pytest.raises(FormatError, match="damaged weight store") as caught:
        redone(example_index(), change)
    assert caught.value.code == "weights_unavailable"
