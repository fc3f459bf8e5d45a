"""Translation of EBNF and structural tags to Lark for llguidance, and the texts that the result matches."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from support.reference_grammar import matches

from penstock.errors import InputError, PenstockError, UnsupportedFeatureError
from penstock.grammar.lark import lark_text, read_ebnf, read_structural_tag, writer
from penstock.grammar.schema import schema_ebnf

llguidance_bytes = pytest.importorskip("support.llguidance_bytes")
END_TOKEN, CALL_TOKEN, OTHER_TOKEN = 256, 257, 258


@pytest.fixture(scope="module")
def special_tokens() -> Any:
    """Return the texts of the tokens `CALL_TOKEN` and `OTHER_TOKEN`."""
    return ("<call>", "<mark>")


def make_matcher(special_tokens: Any, lark: str) -> Any:
    return llguidance_bytes.match_lark(lark, special_tokens)


def accepts(matcher: Any, tokens: list[int]) -> bool:
    return bool(llguidance_bytes.accepts(matcher, tokens))


def draw_prefix(matcher: Any, rng: random.Random) -> str:
    """Return a random text of up to 8 characters that is a prefix of a match."""
    matcher, text = matcher.deep_copy(), bytearray()
    while len(text) < 8:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed_ids = np.flatnonzero(bits[:256]).tolist()
        if not allowed_ids or (matcher.is_accepting() and rng.random() < 0.3):
            break
        text.append(rng.choice(allowed_ids))
        matcher.try_consume_tokens([text[-1]])
    return text.decode()


def draw_expression(rng: random.Random, depth: int) -> str:
    choice = rng.random()
    if depth == 0 or choice < 0.3:
        return rng.choice(['"a"', '"b"', '"ab"', '"aba"', "[ab]", "[abc]", "[bc]", '"c"', '"ca"', '""'])
    subexpressions = [draw_expression(rng, depth - 1) for _ in range(rng.randint(2, 3))]
    if choice < 0.5:
        return " ".join(subexpressions)
    if choice < 0.68:
        return f"({' | '.join(subexpressions)})"
    if choice < 0.84:
        return f"({subexpressions[0]}){rng.choice(['*', '?', '+', '{0,2}', '{1,3}', '{2}', '{1,}'])}"
    return rng.choice(["root", "x", "y", "z"])


@pytest.mark.parametrize("seed", range(12))
def test_the_lark_of_a_random_grammar_matches_the_texts_of_the_grammar(
    seed: int, special_tokens: Any
) -> None:
    rng = random.Random(seed)
    num_checked = 0
    while num_checked < 8:
        rules = {
            name: draw_expression(rng, depth) for name, depth in [("root", 3), ("x", 2), ("y", 2), ("z", 1)]
        }
        ebnf = "".join(f"{name} ::= {body}\n" for name, body in rules.items())
        try:
            matcher = make_matcher(special_tokens, lark_text(read_ebnf(ebnf)))
        except InputError:  # the grammar matches no finite text
            continue
        texts = {"".join(rng.choices("abc", k=rng.randint(0, 7))) for _ in range(30)}
        texts |= {draw_prefix(matcher, rng) for _ in range(20)}
        for text in sorted(texts):
            assert accepts(matcher, list(text.encode())) == matches(read_ebnf(ebnf), text), (ebnf, text)
        num_checked += 1


@pytest.mark.parametrize(
    ("ebnf", "accepted", "rejected"),
    [
        ('root ::= [a-z]* "x"', ["x", "abcx", "xx"], ["abc", ""]),
        # The matcher must not take the longest match of r.
        (
            'root ::= r "x" | "(" root ")"\nr ::= [a-z]*',
            ["abcx", "((xx))"],
            ["(x"],
        ),
        ('root ::= "a" "bc" | "ab" "d" | "(" root ")"', ["abc", "(abd)"], ["ab"]),
        ('root ::= e\ne ::= e "+" t | t\nt ::= [0-9]+ | "(" e ")"', ["1+(2+34)", "12"], ["1+", "()"]),
        (r'root ::= "\x41\u00e9\U0001F600\n\"" [^a\]\-] # end', ['Aé😀\n"b'], ['Aé😀\n"a', 'Aé😀\n"]']),
        ("root ::= .{2}", ["é😀"], ["a", "abc"]),
        ('root ::= ("a" | root "b"){1,2}', ["a", "abab"], ["", "b"]),
        ('root ::=\n  "a" # comment\n  | "b"\nrest ::= "c"', ["a", "b"], ["c"]),
    ],
)
def test_ebnf_accepts_and_rejects_texts(
    ebnf: str, accepted: list[str], rejected: list[str], special_tokens: Any
) -> None:
    matcher = make_matcher(special_tokens, lark_text(read_ebnf(ebnf)))
    assert [text for text in accepted if not accepts(matcher, list(text.encode()))] == []
    assert [text for text in rejected if accepts(matcher, list(text.encode()))] == []


@pytest.mark.parametrize(
    ("ebnf", "message"),
    [
        ("", "no rule named root"),
        ("root ::= nothing", "'nothing' is not defined at line 1, column 10"),
        ('root ::= "a', "unterminated"),
        ('root ::= ("a"', "not closed"),
        ('root ::= "a")', "expected a rule"),
        ("root ::= [z-a]", "out of order"),
        ('root ::= "a"{3,2}', "out of order"),
        ('root ::= "a"{3', "no repetition"),
        (r'root ::= "\ud800"', "surrogate"),
        ('root ::= "a"\nroot ::= "b"', "defined twice"),
        ("root ::= " + "(" * 200 + '"a"' + ")" * 200, "100 deep"),
        ('root ::= root "a"', "allows no output"),
    ],
)
def test_invalid_grammars_are_refused(ebnf: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        lark_text(read_ebnf(ebnf))


def test_unsupported_ebnf_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedFeatureError, match="lookahead"):
        read_ebnf('root ::= "a" (= "b")')
    with pytest.raises(UnsupportedFeatureError, match="TagDispatch"):
        read_ebnf('root ::= TagDispatch(("a", root))')


def test_a_long_chain_of_rules_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MAX_RULE_DEPTH", 60)
    chain = "root ::= r0\n" + "".join(f'r{i} ::= "a" r{i + 1} | root "x"\n' for i in range(80))
    with pytest.raises(InputError, match="the maximum is 60"):
        lark_text(read_ebnf(chain + 'r80 ::= "c"'))


def test_a_json_grammar_has_few_lexemes() -> None:
    lark = lark_text(read_ebnf(schema_ebnf({"type": "object"})))
    lexemes = [line for line in lark.splitlines() if line.startswith("L")]
    assert 5 <= len(lexemes) <= 10
    # With a lexeme for single characters of a string, each mask would visit every token.
    assert not any(line.endswith(": /[\\x{20}-\\x{21}\\x{23}-\\x{5b}]/") for line in lexemes)


def test_a_string_length_becomes_a_bounded_repetition() -> None:
    lark = lark_text(read_ebnf(schema_ebnf({"type": "string", "minLength": 2, "maxLength": 200})))
    assert "{2,200}" in lark
    assert len(lark.splitlines()) < 12


def make_constant(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def make_tag(begin: Any, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


ANY_TEXT = {"type": "any_text"}
TOKEN = {"type": "token", "token": CALL_TOKEN}
TRIGGERED_TAGS = {
    "type": "triggered_tags",
    "triggers": ["<f"],
    "tags": [make_tag("<f=a>", make_constant("x"), "</f>"), make_tag("<f=b>", make_constant("y"), "</f>")],
}
TOKEN_TRIGGERED_TAGS = {
    "type": "token_triggered_tags",
    "trigger_tokens": [CALL_TOKEN],
    "tags": [make_tag(TOKEN, make_constant("x"), "")],
}
SEPARATED_TAGS = {
    "type": "tags_with_separator",
    "tags": [make_tag("<a>", make_constant("x"), "</a>")],
    "separator": ",",
}


@pytest.mark.parametrize(
    ("tag_format", "accepted", "rejected"),
    [
        (
            TRIGGERED_TAGS,
            ["", "hi", "hi<f=a>x</f>", "<<f=a>x</f>or<f=b>y</f>z"],
            ["hi<f", "<f=a>y</f>", "<f=c>"],
        ),
        (
            TRIGGERED_TAGS | {"at_least_one": True},
            ["<f=a>x</f>", "<f=a>x</f>more"],
            ["", "hi", "hi<f=a>x</f>"],
        ),
        (TRIGGERED_TAGS | {"stop_after_first": True}, ["", "hi<f=a>x</f>"], ["<f=a>x</f>more"]),
        (TRIGGERED_TAGS | {"excludes": ["zz"]}, ["az", "z<f=a>x</f>"], ["azz", "zz<f=a>x</f>"]),
        (make_tag("[", TRIGGERED_TAGS, "]"), ["[]", "[hi]", "[hi<f=a>x</f>]"], ["[hi]]", "[hi<f]"]),
        (make_tag("<", ANY_TEXT, ">>"), ["<>>", "<a>b>>"], ["<a", "<a>>b>>"]),
        (make_tag("<", ANY_TEXT | {"excludes": ["no", "o>"]}, ">>"), ["<n>>"], ["<no>>", "<mo>>"]),
        (make_tag("[", ANY_TEXT, ["]", "}"]), ["[a]", "[a}"], ["[a]}"]),
        ({"type": "sequence", "elements": [ANY_TEXT, make_constant("END")]}, ["END", "abEND"], ["abENDx"]),
        (SEPARATED_TAGS, ["", "<a>x</a>", "<a>x</a>,<a>x</a>"], ["<a>x</a>,"]),
        (SEPARATED_TAGS | {"at_least_one": True}, ["<a>x</a>"], [""]),
        (SEPARATED_TAGS | {"stop_after_first": True}, ["", "<a>x</a>"], ["<a>x</a>,<a>x</a>"]),
        ({"type": "repeat", "min": 1, "max": -1, "content": make_constant("ab")}, ["ab", "abab"], ["", "a"]),
        ({"type": "optional", "content": make_constant("ab")}, ["", "ab"], ["a"]),
        ({"type": "dispatch", "rules": [["<t>", make_constant("x")]]}, ["", "a<t>xb<t>x"], ["a<t>y"]),
        ({"type": "dispatch", "rules": [["<t>", make_constant("x")]], "loop": False}, ["a<t>x"], ["a<t>xb"]),
        ({"type": "grammar", "grammar": 'root ::= "a" root | "b"'}, ["aab"], ["aa"]),
        (
            TOKEN_TRIGGERED_TAGS,
            [[], [104, CALL_TOKEN, 120], [104, OTHER_TOKEN, 105], [CALL_TOKEN, 120, 97]],
            [[CALL_TOKEN], [CALL_TOKEN, 97]],
        ),
        (
            make_tag(TOKEN, ANY_TEXT, TOKEN),
            [[CALL_TOKEN, 97, CALL_TOKEN]],
            [[CALL_TOKEN, 97], [CALL_TOKEN, OTHER_TOKEN, CALL_TOKEN], "<call>a<call>"],
        ),
        ({"type": "any_tokens", "exclude_tokens": [OTHER_TOKEN]}, [[], [CALL_TOKEN, 97]], [[OTHER_TOKEN]]),
        (
            {"type": "exclude_token", "exclude_tokens": [OTHER_TOKEN]},
            [[CALL_TOKEN], [97]],
            [[OTHER_TOKEN], []],
        ),
    ],
)
def test_structural_tags_accept_and_reject_outputs(
    tag_format: Any, accepted: list[Any], rejected: list[Any], special_tokens: Any
) -> None:
    tag_text = json.dumps({"type": "structural_tag", "format": tag_format})
    matcher = make_matcher(special_tokens, lark_text(read_structural_tag(tag_text)))

    def is_accepted(text: Any) -> bool:
        return accepts(matcher, list(text.encode()) if isinstance(text, str) else text)

    assert [text for text in accepted if not is_accepted(text)] == []
    assert [text for text in rejected if is_accepted(text)] == []


@pytest.mark.parametrize(
    ("tag_format", "message"),
    [
        ({"type": "nothing"}, "no format 'nothing'"),
        ({"type": "sequence", "elements": []}, "needs elements"),
        (ANY_TEXT | {"max_tokens": 3}, "max_tokens"),
        (make_tag("<", ANY_TEXT, ["", ">"]), "not empty"),
        (TRIGGERED_TAGS | {"triggers": ["<g"]}, "begin with exactly one trigger"),
        ({"type": "token", "token": "<x>"}, "ids or texts"),
        ("text", "object with a type"),
    ],
)
def test_invalid_structural_tags_are_refused(tag_format: Any, message: str) -> None:
    with pytest.raises(PenstockError, match=message):
        read_structural_tag(json.dumps({"type": "structural_tag", "format": tag_format}))
