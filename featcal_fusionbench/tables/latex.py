r"""A document in LaTeX: floats to ``\input``, with booktabs."""

from __future__ import annotations

import re

from .document import Document, Entry, Grid, Note

__all__ = ["latex"]

_CHARACTERS = {character: f"\\{character}" for character in "{}$&%#_"}
_CHARACTERS |= {character: f"${character}$" for character in "<>|"}
_CHARACTERS |= {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_CHARACTERS |= {'"': "''", "–": "--", "—": "---", "…": r"\dots{}", "§": r"\S{}", "¶": r"\P{}"}
_CHARACTERS |= {"−": "$-$", "‖": r"$\|$"}
_MATHEMATICS = {"±": "pm", "×": "times", "†": "dagger", "‡": "ddagger", "·": "cdot", "≈": "approx"}
_MATHEMATICS |= {"α": "alpha", "ε": "varepsilon", "λ": "lambda", "μ": "mu", "ρ": "rho"}
_MATHEMATICS |= {"σ": "sigma", "ω": "omega", "→": "rightarrow", "≤": "leq", "≥": "geq"}
_CHARACTERS |= {character: f"$\\{name}$" for character, name in _MATHEMATICS.items()}
_SPECIAL = re.compile("|".join(map(re.escape, _CHARACTERS)))


def latex(document: Document) -> str:
    r"""Write a document as LaTeX: a float per grid, and its notes.

    What a reader of the paper needs is printed below the floats. Checkpoints and commands are
    comments: there for whoever opens the file.
    """
    parts = [
        f"% {_one_line(document.title)}",
        r"% In the preamble: \usepackage[utf8]{inputenc} \usepackage{adjustbox,booktabs}",
        *(_grid(document, grid) for grid in document.grids),
    ]
    printed = [note for note in document.notes if note.kind != "record"]
    if printed:
        lines = [_note(note) for note in printed]
        parts.append(
            "\n\n".join([r"\begingroup\footnotesize\raggedright", *lines, r"\par\endgroup"])
        )
    for note in document.notes:
        if note not in printed:
            parts.append("\n".join(f"% {_one_line(line)}" for line in (note.heading, *note.lines)))
    return "\n\n".join(parts) + "\n"


def _grid(document: Document, grid: Grid) -> str:
    rows = grid.entries.map(_entry).rename(columns=_escape)
    for at in grid.rules:
        rows.iat[at, 0] = f"\\midrule\n{rows.iat[at, 0]}"
    columns = "l" * grid.text_columns + "r" * (rows.shape[1] - grid.text_columns)
    caption = _escape(f"{document.title}: {grid.title}. {grid.caption}")
    return "\n".join(
        [
            r"\begin{table*}[t]",
            r"\centering\small",
            f"\\caption{{{caption}}}",
            f"\\label{{tab:{_label(document.name)}-{_label(grid.name)}}}",
            r"\begin{adjustbox}{max width=\textwidth}",
            # not escaped by pandas, which leaves Greek letters and signs to packages
            rows.to_latex(index=False, escape=False, column_format=columns).rstrip(),
            r"\end{adjustbox}",
            r"\end{table*}",
        ]
    )


def _entry(entry: Entry) -> str:
    text = _escape(entry.text)
    marks = f"\\textsuperscript{{{_escape(entry.marks)}}}" if entry.marks else ""
    spread = f" {{\\scriptsize$\\pm$ {_escape(entry.spread)}}}" if entry.spread else ""
    return (f"\\textbf{{{text}}}" if entry.bold and text else text) + spread + marks


def _note(note: Note) -> str:
    lines = [_escape(line) for line in note.lines]
    if note.code:
        text = " ".join(f"\\texttt{{{line}}}" for line in lines)
    else:
        text = " ".join(line if line.endswith((".", ":")) else f"{line}." for line in lines)
    return f"\\textbf{{{_escape(note.heading)}.}} {text}"


def _escape(text: str) -> str:
    escaped = _SPECIAL.sub(lambda match: _CHARACTERS[match.group()], _one_line(text))
    # these two after the end of a row would be read as belonging to it
    return f"{{}}{escaped}" if escaped.startswith(("[", "*")) else escaped


def _label(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")


def _one_line(text: str) -> str:
    return " ".join(text.split())
