"""The text of an answer that grows token by token: whole characters, up to what ends it."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from apbv.decode.text import AnswerText


def certain_text(
    pieces: list[bytes], stop: list[str], least: int, stop_token: int | None
) -> tuple[str, bool]:
    """The definition: letter by letter, until a stop string is complete; and whether anything has
    ended the text.

    A token's letters count from the token on with which they are whole characters, the last ones
    from the end.
    """
    text = ""
    for count in range(1, len(pieces) + 2):
        is_last = count > len(pieces) or count - 1 == stop_token
        data = b"".join(pieces[: count - 1 if is_last else count]).decode(errors="replace")
        if is_last:
            new = data.rstrip("\ufffd")
        elif data.endswith("\ufffd"):
            new = text  # no letter is whole yet
        else:
            new = data
        for end in range(len(text) + 1, len(new) + 1):
            complete = [string for string in stop if new[:end].endswith(string)]
            if complete and (count - is_last) > least:
                return new[: end - max(map(len, complete))], True
        text = new
        if is_last:
            return text, count <= len(pieces)


LETTERS = "aab🙂é"


@settings(max_examples=150)
@example(text="baa", stop=["a", "bab"], widths=[1], missing=0, least=2, stop_token=None)
@given(
    text=st.text(LETTERS, max_size=20),
    stop=st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=4),
    widths=st.lists(st.integers(1, 7), min_size=1, max_size=9),
    missing=st.integers(0, 3),
    least=st.sampled_from([0, 0, 1, 3]),
    stop_token=st.none() | st.integers(0, 9),
)
def test_text_ends_where_something_ends_it_and_never_inside_a_character(
    text, stop, widths, missing, least, stop_token
):
    """Tokens are any pieces of UTF-8, as byte-level tokenizers have them; the last may be cut
    off."""
    data = text.encode()[: len(text.encode()) - missing]
    pieces = []
    while data:
        width = widths[len(pieces) % len(widths)]
        pieces.append(data[:width])
        data = data[width:]

    def decode(tokens) -> str:
        return b"".join(pieces[token] for token in tokens).decode(errors="replace")

    tokens = range(len(pieces))
    stop_ids = [] if stop_token is None else [stop_token]
    expected, stopped = certain_text(pieces, stop, least, stop_token)
    answer = AnswerText(decode, stop, stop_ids, least)
    said = ""
    for count in range(1, len(pieces) + 1):
        said += answer.update(tokens[:count])
        assert expected.startswith(said), "what is sent cannot be taken back"
        if not stop and stop_token is None and (whole := decode(tokens[:count])).isascii():
            assert said == whole, "nothing is held back that is certain"
    assert (said + answer.finish(tokens), answer.stopped) == (expected, stopped)
    assert AnswerText(decode, stop, stop_ids, least).finish(tokens) == expected
