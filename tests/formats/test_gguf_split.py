"""Split GGUF files: each part leads to all others, and what does not belong together is refused by name."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mzd.errors import FormatError
from mzd.formats.gguf_split import PARTS_MAX, joined, model_stem, numbered_names, part_names
from tests.formats.gguf_files import F32, I32, STRING, U16, Gguf, Tensor, parse

NAMES = part_names("m-00001-of-00003.gguf")


def part(place, *tensors, count=3, total=4, **metadata):
    """One part's file; `total` tensors are in all parts together."""
    keys = {"split.no": (U16, place), "split.count": (U16, count), "split.tensors.count": (I32, total)}
    return Gguf({**keys, **metadata}, tuple(Tensor(name, (8,)) for name in tensors))


def parts():
    """A right model in three parts."""
    return [part(0, "a", "b", **{"general.name": (STRING, "x")}), part(1, "c"), part(2, "d")]


def headers(files, names=NAMES):
    return [parse(file.to_bytes(), name=name) for file, name in zip(files, names, strict=True)]


def refusal(files, names=NAMES):
    with pytest.raises(FormatError) as caught:
        joined(headers(files, names))
    assert caught.value.code == "invalid_model"
    return caught.value.message


def replaced(place, file):
    files = parts()
    files[place] = file
    return files


class TestNames:
    @given(st.text(min_size=1), st.integers(1, PARTS_MAX), st.data())
    def test_each_part_leads_to_all(self, stem, count, data):
        names = numbered_names(stem, count)
        name = data.draw(st.sampled_from(names))
        assert part_names(name) == names
        assert model_stem(name) == stem
        assert len(set(names)) == count

    @pytest.mark.parametrize(
        "name",
        ["m.gguf", "m-1-of-3.gguf", "m-00001-of-00003", "-00001-of-00003.gguf", "m-٠٠٠٠١-of-00003.gguf", ""],
    )
    def test_other_names_are_whole_models(self, name):
        assert part_names(name) == (name,)
        assert model_stem(name) == name.removesuffix(".gguf")

    @pytest.mark.parametrize(
        "numbers", ["00000-of-00003", "00004-of-00003", "00001-of-00000", "00001-of-99999"]
    )
    def test_numbers_that_no_part_has(self, numbers):
        with pytest.raises(FormatError, match=numbers):
            part_names(f"m-{numbers}.gguf")


class TestJoined:
    def test_tensors_lie_as_if_the_files_lay_end_to_end(self):
        files = parts()
        found = joined(headers(files))
        sizes = [len(file.to_bytes()) for file in files]
        assert list(found.tensors) == ["a", "b", "c", "d"]
        alone = [tensor for header in headers(files) for tensor in header.tensors.values()]
        starts = [0, 0, sizes[0], sizes[0] + sizes[1]]
        assert [tensor.offset_bytes for tensor in found.tensors.values()] == [
            tensor.offset_bytes + start for tensor, start in zip(alone, starts, strict=True)
        ]
        assert found.size_bytes == sum(sizes)
        assert (found.name, found.metadata) == (NAMES[0], {"general.name": "x"})

    def test_a_whole_model_is_itself(self):
        (whole,) = headers([Gguf({"general.name": (STRING, "x")}, (Tensor("a", (8,)),))], ["m.gguf"])
        assert joined([whole]) == whole

    def test_a_nan_in_its_metadata_makes_no_model_another(self):
        """A NaN is not equal to itself."""
        (whole,) = headers([Gguf({"x.y": (F32, math.nan)}, (Tensor("a", (8,)),))], ["m.gguf"])
        assert list(joined([whole]).tensors) == ["a"]

    @pytest.mark.parametrize("count", [0, 1])
    def test_a_merged_model_is_whole(self, count):
        file = part(0, "a", count=count, total=1)
        for name in ("m.gguf", "m-00001-of-00001.gguf"):
            assert list(joined(headers([file], [name])).tensors) == ["a"]

    def test_a_part_under_another_name_says_what_to_do(self):
        message = refusal([part(1, "c")], ["big.gguf"])
        assert message.startswith("big.gguf: it is part 2 of a model in 3 files")
        assert "NAME-00001-of-00003.gguf" in message

    def test_a_whole_model_called_a_part(self):
        whole = Gguf({}, (Tensor("c", (8,)),))
        assert refusal(replaced(1, whole)) == f"{NAMES[1]}: it is called part 2 of 3, but is a whole model"

    def test_parts_in_another_order(self):
        first, second, third = parts()
        message = refusal([first, third, second])
        assert message == f"{NAMES[1]}: it is called part 2 of 3, but is part 3 of a model in 3 files"

    def test_a_part_of_a_model_in_more_files(self):
        assert "is part 2 of a model in 5 files" in refusal(replaced(1, part(1, "c", count=5)))

    def test_a_part_of_another_model(self):
        foreign = part(2, "d", **{"general.name": (STRING, "y")})
        message = refusal(replaced(2, foreign))
        assert message.startswith(f"{NAMES[2]}: its 'general.name' is not that of {NAMES[0]}")
        same = part(2, "d", **{"general.name": (STRING, "x")})
        assert len(joined(headers(replaced(2, same))).tensors) == 4

    def test_a_tensor_that_two_parts_have(self):
        assert refusal(replaced(2, part(2, "b"))) == f"{NAMES[2]}: tensor 'b' is in {NAMES[0]} too"

    def test_another_number_of_tensors(self):
        files = replaced(1, part(1, "c", "e"))
        assert "a model of 4 tensors, all files together hold 5" in refusal(files)
        message = refusal(replaced(2, part(2, "d", total=9)))
        assert message.startswith(f"{NAMES[2]}: it is of a model of 9 tensors")

    @pytest.mark.parametrize("key", ["split.no", "split.count", "split.tensors.count"])
    @pytest.mark.parametrize("value", [(STRING, "1"), (I32, -1)])
    def test_numbers_that_are_none(self, key, value):
        assert f"{key} is" in refusal(replaced(1, part(1, "c", **{key: value})))
