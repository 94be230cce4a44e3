"""Places in a template: breaks between its tokens change nothing of what it renders."""

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mzd.model.template_places import SpreadTemplate

ENVIRONMENT = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)

_pieces = st.sampled_from(
    [
        "text",
        "\n",
        "  ",
        "\r\n",
        "{{ x }}",
        "{{- x -}}",
        "{{ 'a\nb' ~ x|upper }}",
        "{% if x %}",
        "  {%- if not x == 'y' -%}  ",
        "{% endif %}",
        "{%+ set z = [1, 2.5, {'k': x}] %}",
        "{# a {{ comment }} #}",
        "{% raw %}{{ x }}{% endraw %}",
        "{% for a in 'bc' %}",
        "{% endfor %}",
        "{{ $",
        "}}",
    ]
)
sources = st.lists(_pieces, max_size=12).map("".join)


def rendered(source):
    try:
        return ENVIRONMENT.from_string(source).render(x="<x>")
    except jinja2.TemplateError as error:
        return type(error), error.message


@given(sources)
def test_the_spread_template_renders_the_same_or_fails_the_same(source):
    assert rendered(SpreadTemplate(source, ENVIRONMENT.lexer).text) == rendered(source)


@given(sources)
def test_every_line_of_it_is_a_place_in_the_source(source):
    spread = SpreadTemplate(source, ENVIRONMENT.lexer)
    lines = source.replace("\r\n", "\n").split("\n")
    places = [spread.place(line) for line in range(1, spread.text.count("\n") + 2)]
    assert places == sorted(places)
    assert all(1 <= column <= len(lines[line - 1]) + 1 for line, column in places)


@pytest.mark.parametrize(
    ("source", "line", "place"),
    [
        ("", 1, (1, 1)),
        ("text", 9, (1, 1)),
        ("ab {{ x }}", 2, (1, 7)),
        ("ab {{ x.y }}", 4, (1, 9)),
        ("a\nb {{\n x }}", 4, (3, 2)),
    ],
)
def test_places_by_hand(source, line, place):
    assert SpreadTemplate(source, ENVIRONMENT.lexer).place(line) == place
