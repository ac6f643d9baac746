"""Tables for a paper: LaTeX with the rules of booktabs, numbers to the right, notes below."""

from __future__ import annotations

from collections.abc import Iterable

from ctr_pe.study.rendering import Table

SIGNS = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": "$<$",
    ">": "$>$",
    "−": "$-$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "†": r"$^\dagger$",
    "‡": r"$^\ddagger$",
    "–": "--",
    "✗": r"$\times$",
    "→": r"$\rightarrow$",
}


def as_latex(tables: Iterable[Table]) -> str:
    """A table environment for each; ``\\input`` it after ``\\usepackage{booktabs}``."""
    parts = [r"% needs \usepackage{booktabs}"]
    for table in tables:
        header, *rows = table.shown()
        lines = [" & ".join(map(escaped, line)) + r" \\" for line in [header, *rows]]
        body = [r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"]
        parts.append(
            "\n".join(
                [
                    r"\begin{table}[t]",
                    r"\centering",
                    rf"\caption{{{escaped(table.title)}}}",
                    rf"\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}",
                    *body,
                    r"\end{tabular}",
                    *[rf"\par\footnotesize {escaped(note)}" for note in table.notes],
                    r"\end{table}",
                ]
            )
        )
    return "\n\n".join(parts) + "\n"


def escaped(text: str) -> str:
    """Text as LaTeX shows it; a sign before a digit is a minus, not a hyphen."""
    found = []
    for before, sign, after in zip(" " + text, text, text[1:] + " ", strict=False):
        minus = sign == "-" and after.isdigit() and before in " [(/"
        found.append("$-$" if minus else SIGNS.get(sign, sign))
    return "".join(found)
