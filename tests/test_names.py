"""Names: one class name, one class; and the words of the field, not those that once stood for them."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest


class Rule(NamedTuple):
    """``word`` of an identifier, or regular expression of prose, that stands for something with a better name.

    ``where``: the folders in which it has that meaning; everywhere if there are none.
    """

    word: str
    say: str
    where: tuple[str, ...] = ()


IDENTIFIERS = [
    Rule("asked", "candidates, requests, wanted"),
    Rule("own", "history, target", ("ctr_pe/models", "ctr_pe/serving")),
    Rule("known", "lengths, values, vocabulary", ("ctr_pe/sequence", "ctr_pe/units")),
    Rule("taken", "gather, scatter"),
    Rule("placed", "scatter, offsets"),
    Rule("here", "on the CPU: cpu, host", ("ctr_pe/sequence",)),
    Rule("admitted", "mask"),
    Rule("barrier", "additive mask"),
    Rule("apart", "prefix_stable"),
    Rule("likeness", "gate_logits"),
    Rule("steps", "gate_weights", ("ctr_pe/ops/contextual", "ctr_pe/pe/contextual.py", "ctr_pe/pe/cape")),
    Rule("steady", "average, schedule"),
    Rule("parcel", "pinned transfer"),
    Rule("ranks", "process group", ("ctr_pe/utils", "ctr_pe/training", "ctr_pe/fuxictr", "ctr_pe/commands")),
    Rule("together", "process group", ("ctr_pe/utils", "ctr_pe/training", "ctr_pe/commands", "ctr_pe/fuxictr")),
    Rule("share", "rank slice", ("ctr_pe/utils", "ctr_pe/training")),
    Rule("draws", "generator, generators"),
    Rule("nothing", "unsupported, empty, base"),
    Rule("elsewhere", "unsupported"),
    Rule("untrained", "cold_start"),
    Rule("live", "watcher, reload"),
    Rule("told", "on_reload, reported"),
    Rule("captured", "cuda_graph"),
    Rule("recorded", "cuda_graph"),
    Rule("contents", "schema"),
]
PROSE = [
    Rule(r"not,? or too rarely,? in", "out of vocabulary (OOV)"),
    Rule(r"cannot succeed", "divergence, non-finite"),
    Rule(r"made ahead", "prefetch"),
    Rule(r"from (?:the )?first (?:rank|process)", "broadcast"),
    Rule(r"what is asked", "candidates, requests"),
    Rule(r"admitted", "mask"),
    Rule(r"barrier", "additive mask", ("ctr_pe", "model_zoo", "docs")),
    Rule(r"apart from|stays? apart|``apart``|:attr:`apart`", "prefix-stable, separate", ("ctr_pe", "model_zoo")),
    Rule(r"likeness", "gate logits, similarity", ("ctr_pe", "model_zoo")),
    Rule(r"steady|steadied", "exponential moving average, schedule", ("ctr_pe", "model_zoo")),
    Rule(r"parcels?", "pinned transfer"),
    Rule(r"untrained", "cold start"),
    Rule(r"(?:live|told) models?|models? (?:that is )?live", "model watcher, reload"),
    Rule(r"(?:captured|recorded) (?:requests?|graphs?|one)|(?:graph|requests?)(?: is|s are|,) recorded", "CUDA graph"),
]
EXCEPTIONS = {
    "likeness_dim": "an option of cape_cosine, which configurations and stored runs have",
    "likeness_of": "an option of cape_cosine, which configurations and stored runs have",
    "cape_constant+likeness": "a chain with the encoding `likeness`",
    "pe.likeness": "its module",
    "Likeness": "its class",
    '"likeness"': "its name",
    "``likeness``": "its name",
    "debug_barrier": "of Triton's language",
}


def sources(checkout: Path) -> list[Path]:
    return [file for folder in ("ctr_pe", "model_zoo") for file in sorted((checkout / folder).rglob("*.py"))]


def documents(checkout: Path) -> list[Path]:
    return [checkout / "README.md", checkout / "CONTRIBUTING.md", *sorted((checkout / "docs").glob("*.md"))]


ANY_PROSE = re.compile("|".join(rule.word for rule in PROSE), re.IGNORECASE)
"""What has none of these breaks no rule."""


@cache
def tokens(source: str) -> Sequence[tokenize.TokenInfo]:
    """Names, comments and texts of a module."""
    kinds = (tokenize.NAME, tokenize.COMMENT, tokenize.STRING)
    return [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type in kinds]


@cache
def words_of(identifier: str) -> set[str]:
    """``FirstWord_second`` -> first, word, second."""
    return set(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", identifier).lower().split("_"))


def applies(rule: Rule, name: str) -> bool:
    return not rule.where or name.startswith(rule.where)


def wrong_identifiers(name: str, source: str) -> Iterator[tuple[str, str]]:
    """(word, where it is and what to say) of each identifier of a file with a word that means something else."""
    rules = {rule.word: rule for rule in IDENTIFIERS if applies(rule, name)}
    for token in tokens(source):
        if token.type == tokenize.NAME and token.string not in EXCEPTIONS:
            for word in words_of(token.string) & rules.keys():
                yield word, f"{name}:{token.start[0]}: {token.string}: say {rules[word].say}"


def prose_of(name: str, source: str) -> Iterator[tuple[int, str]]:
    """First line and text of all comments and texts of a module, docstrings among them; of a document the whole."""
    if name.endswith(".md"):
        yield 1, source
        return
    for token in tokens(source):
        if token.type != tokenize.NAME:
            yield token.start[0], token.string


def wrong_prose(name: str, source: str) -> Iterator[tuple[str, str]]:
    for line, text in prose_of(name, source):
        if not ANY_PROSE.search(text):
            continue
        for exception in EXCEPTIONS:
            text = text.replace(exception, "-" * len(exception))
        for rule in PROSE:
            for match in re.finditer(rf"\b(?:{rule.word})(?!\w)", text, re.IGNORECASE) if applies(rule, name) else ():
                at = line + text.count("\n", 0, match.start())
                yield rule.word, f"{name}:{at}: {match[0]}: say {rule.say}"


def test_a_class_name_is_that_of_one_class(checkout: Path) -> None:
    """In all of the package, private names included."""
    places: dict[str, list[str]] = defaultdict(list)
    for file in sources(checkout):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{file.relative_to(checkout)}:{node.lineno}")
    twice = {name: where for name, where in places.items() if len(where) > 1}
    assert twice == {}


@pytest.mark.parametrize("of", [wrong_identifiers, wrong_prose])
def test_the_words_of_the_field_are_used(checkout: Path, of: object) -> None:
    assert callable(of)
    files = sources(checkout) if of is wrong_identifiers else [*sources(checkout), *documents(checkout)]
    found = [one for file in files for one in of(str(file.relative_to(checkout)), file.read_text(encoding="utf-8"))]
    assert [text for _, text in found] == []


def test_every_rule_finds_its_word() -> None:
    for rule in IDENTIFIERS:
        name = f"{(rule.where or ('ctr_pe',))[0]}/any.py"
        source = f"all_{rule.word} = {rule.word.title()}Items()"
        assert {word for word, _ in wrong_identifiers(name, source)} == {rule.word}
    for text, word in {
        '"""Attributes apart from it."""': PROSE[7].word,
        "# steps that cannot succeed": PROSE[1].word,
        'x = "not, or too rarely, in the training rows"': PROSE[0].word,
        "'''The likeness of\nitems.'''": PROSE[8].word,
    }.items():
        assert [found for found, _ in wrong_prose("ctr_pe/any.py", text)] == [word]
    assert not list(wrong_prose("ctr_pe/any.py", "# ``likeness_dim`` and ``cape_constant+likeness``"))
    assert not list(wrong_identifiers("ctr_pe/any.py", "likeness_dim = unbarriered = known"))
