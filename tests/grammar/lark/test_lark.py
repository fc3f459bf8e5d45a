"""Translation for llguidance: the translated grammar matches the same texts as the original one."""

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
END, CALL, MARK = 256, 257, 258


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return ("<call>", "<mark>")


def matcher_of(special: Any, lark: str) -> Any:
    return llguidance_bytes.matcher_of(lark, special)


def accepts(matcher: Any, tokens: list[int]) -> bool:
    return bool(llguidance_bytes.accepts(matcher, tokens))


def walked(matcher: Any, choose: random.Random) -> str:
    """Return a text that the matcher accepts, complete or not."""
    matcher, text = matcher.deep_copy(), bytearray()
    while len(text) < 8:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[:256]).tolist()
        if not allowed or (matcher.is_accepting() and choose.random() < 0.3):
            break
        text.append(choose.choice(allowed))
        matcher.try_consume_tokens([text[-1]])
    return text.decode()


def expression(choose: random.Random, depth: int) -> str:
    kind = choose.random()
    if depth == 0 or kind < 0.3:
        return choose.choice(['"a"', '"b"', '"ab"', '"aba"', "[ab]", "[abc]", "[bc]", '"c"', '"ca"', '""'])
    inner = [expression(choose, depth - 1) for _ in range(choose.randint(2, 3))]
    if kind < 0.5:
        return " ".join(inner)
    if kind < 0.68:
        return f"({' | '.join(inner)})"
    if kind < 0.84:
        return f"({inner[0]}){choose.choice(['*', '?', '+', '{0,2}', '{1,3}', '{2}', '{1,}'])}"
    return choose.choice(["root", "x", "y", "z"])


@pytest.mark.parametrize("seed", range(12))
def test_any_grammar_matches_its_definition(seed: int, tokenizer: Any) -> None:
    choose = random.Random(seed)
    num_checked = 0
    while num_checked < 8:
        rules = {
            name: expression(choose, depth) for name, depth in [("root", 3), ("x", 2), ("y", 2), ("z", 1)]
        }
        ebnf = "".join(f"{name} ::= {body}\n" for name, body in rules.items())
        try:
            matcher = matcher_of(tokenizer, lark_text(read_ebnf(ebnf)))
        except InputError:  # no finite text matches
            continue
        texts = {"".join(choose.choices("abc", k=choose.randint(0, 7))) for _ in range(30)}
        texts |= {walked(matcher, choose) for _ in range(20)}
        for text in sorted(texts):
            assert accepts(matcher, list(text.encode())) == matches(read_ebnf(ebnf), text), (ebnf, text)
        num_checked += 1


@pytest.mark.parametrize(
    ("ebnf", "inside", "outside"),
    [
        ('root ::= [a-z]* "x"', ["x", "abcx", "xx"], ["abc", ""]),
        ('root ::= r "x" | "(" root ")"\nr ::= [a-z]*', ["abcx", "((xx))"], ["(x"]),  # not the longest match
        ('root ::= "a" "bc" | "ab" "d" | "(" root ")"', ["abc", "(abd)"], ["ab"]),
        ('root ::= e\ne ::= e "+" t | t\nt ::= [0-9]+ | "(" e ")"', ["1+(2+34)", "12"], ["1+", "()"]),
        (r'root ::= "\x41\u00e9\U0001F600\n\"" [^a\]\-] # end', ['Aé😀\n"b'], ['Aé😀\n"a', 'Aé😀\n"]']),
        ("root ::= .{2}", ["é😀"], ["a", "abc"]),
        ('root ::= ("a" | root "b"){1,2}', ["a", "abab"], ["", "b"]),
        ('root ::=\n  "a" # comment\n  | "b"\nrest ::= "c"', ["a", "b"], ["c"]),
    ],
)
def test_ebnf(ebnf: str, inside: list[str], outside: list[str], tokenizer: Any) -> None:
    matcher = matcher_of(tokenizer, lark_text(read_ebnf(ebnf)))
    assert [text for text in inside if not accepts(matcher, list(text.encode()))] == []
    assert [text for text in outside if accepts(matcher, list(text.encode()))] == []


@pytest.mark.parametrize(
    ("ebnf", "words"),
    [
        ("", "no rule root"),
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
def test_invalid_grammars_are_refused(ebnf: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
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


def test_json_has_few_lexemes_and_its_strings_are_whole_ones() -> None:
    lark = lark_text(read_ebnf(schema_ebnf({"type": "object"})))
    lexemes = [line for line in lark.splitlines() if line.startswith("L")]
    assert 5 <= len(lexemes) <= 10
    # Without a lexeme of one character that a string repeats: a mask would walk over every token.
    assert not any(line.endswith(": /[\\x{20}-\\x{21}\\x{23}-\\x{5b}]/") for line in lexemes)


def test_a_counting_chain_becomes_a_repetition() -> None:
    lark = lark_text(read_ebnf(schema_ebnf({"type": "string", "minLength": 2, "maxLength": 200})))
    assert "{2,200}" in lark
    assert len(lark.splitlines()) < 12


def constant(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}


def tag(begin: Any, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


ANY = {"type": "any_text"}
TOKEN = {"type": "token", "token": CALL}
TRIGGERED = {
    "type": "triggered_tags",
    "triggers": ["<f"],
    "tags": [tag("<f=a>", constant("x"), "</f>"), tag("<f=b>", constant("y"), "</f>")],
}
TOKEN_TRIGGERED = {
    "type": "token_triggered_tags",
    "trigger_tokens": [CALL],
    "tags": [tag(TOKEN, constant("x"), "")],
}
SEPARATED = {"type": "tags_with_separator", "tags": [tag("<a>", constant("x"), "</a>")], "separator": ","}


@pytest.mark.parametrize(
    ("part", "inside", "outside"),
    [
        (TRIGGERED, ["", "hi", "hi<f=a>x</f>", "<<f=a>x</f>or<f=b>y</f>z"], ["hi<f", "<f=a>y</f>", "<f=c>"]),
        (TRIGGERED | {"at_least_one": True}, ["<f=a>x</f>", "<f=a>x</f>more"], ["", "hi", "hi<f=a>x</f>"]),
        (TRIGGERED | {"stop_after_first": True}, ["", "hi<f=a>x</f>"], ["<f=a>x</f>more"]),
        (TRIGGERED | {"excludes": ["zz"]}, ["az", "z<f=a>x</f>"], ["azz", "zz<f=a>x</f>"]),
        (tag("[", TRIGGERED, "]"), ["[]", "[hi]", "[hi<f=a>x</f>]"], ["[hi]]", "[hi<f]"]),
        (tag("<", ANY, ">>"), ["<>>", "<a>b>>"], ["<a", "<a>>b>>"]),
        (tag("<", ANY | {"excludes": ["no", "o>"]}, ">>"), ["<n>>"], ["<no>>", "<mo>>"]),
        (tag("[", ANY, ["]", "}"]), ["[a]", "[a}"], ["[a]}"]),
        ({"type": "sequence", "elements": [ANY, constant("END")]}, ["END", "abEND"], ["abENDx"]),
        (SEPARATED, ["", "<a>x</a>", "<a>x</a>,<a>x</a>"], ["<a>x</a>,"]),
        (SEPARATED | {"at_least_one": True}, ["<a>x</a>"], [""]),
        (SEPARATED | {"stop_after_first": True}, ["", "<a>x</a>"], ["<a>x</a>,<a>x</a>"]),
        ({"type": "repeat", "min": 1, "max": -1, "content": constant("ab")}, ["ab", "abab"], ["", "a"]),
        ({"type": "optional", "content": constant("ab")}, ["", "ab"], ["a"]),
        ({"type": "dispatch", "rules": [["<t>", constant("x")]]}, ["", "a<t>xb<t>x"], ["a<t>y"]),
        ({"type": "dispatch", "rules": [["<t>", constant("x")]], "loop": False}, ["a<t>x"], ["a<t>xb"]),
        ({"type": "grammar", "grammar": 'root ::= "a" root | "b"'}, ["aab"], ["aa"]),
        (TOKEN_TRIGGERED, [[], [104, CALL, 120], [104, MARK, 105], [CALL, 120, 97]], [[CALL], [CALL, 97]]),
        (tag(TOKEN, ANY, TOKEN), [[CALL, 97, CALL]], [[CALL, 97], [CALL, MARK, CALL], "<call>a<call>"]),
        ({"type": "any_tokens", "exclude_tokens": [MARK]}, [[], [CALL, 97]], [[MARK]]),
        ({"type": "exclude_token", "exclude_tokens": [MARK]}, [[CALL], [97]], [[MARK], []]),
    ],
)
def test_structural_tags(part: Any, inside: list[Any], outside: list[Any], tokenizer: Any) -> None:
    tag_text = json.dumps({"type": "structural_tag", "format": part})
    matcher = matcher_of(tokenizer, lark_text(read_structural_tag(tag_text)))

    def is_in(text: Any) -> bool:
        return accepts(matcher, list(text.encode()) if isinstance(text, str) else text)

    assert [text for text in inside if not is_in(text)] == []
    assert [text for text in outside if is_in(text)] == []


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "nothing"}, "no format 'nothing'"),
        ({"type": "sequence", "elements": []}, "needs elements"),
        (ANY | {"max_tokens": 3}, "max_tokens"),
        (tag("<", ANY, ["", ">"]), "not empty"),
        (TRIGGERED | {"triggers": ["<g"]}, "begin with one trigger"),
        ({"type": "token", "token": "<x>"}, "ids or texts"),
        ("text", "object with a type"),
    ],
)
def test_invalid_structural_tags_are_refused(part: Any, words: str) -> None:
    with pytest.raises(PenstockError, match=words):
        read_structural_tag(json.dumps({"type": "structural_tag", "format": part}))
