"""The text the demo model is trained on, as plain documents and as questions with answers.

Four sources, all of which may be redistributed in derived form:

- Python's HTML documentation (PSF licence 2), as python.org and Linux distributions ship it: pages become
  plain documents; functions, classes, glossary terms and FAQ entries also become questions and answers;
- docstrings of the standard library of the running interpreter (PSF licence 2);
- block comments of the same files (PSF licence 2);
- `demo_dialogues.txt`, hand-written small talk (this project's licence).

Without the HTML documentation the language topics that ship with every interpreter
(`pydoc_data.topics`) take its place; the model then knows less.
"""

from __future__ import annotations

import hashlib
import importlib
import random
import re
import sysconfig
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from demo_docs import Entry, Page, clean, plain_paragraphs, read_page
from demo_library import read_library

ANSWER_CHARS = 420
"""Upper bound of a chat answer taken from documentation, in characters (about 110 tokens)."""

SIGNATURE_CHARS = 90
"""A signature shorter than this opens the answer."""

HELD_OUT_ONE_IN = 40
"""One page or docstring in this many is kept for the validation loss."""

DOCS_FOLDERS = ("tutorial", "library", "reference", "howto", "faq", "using")
"""Folders of the HTML documentation that are read; release notes and the C API are left out."""

# fmt: off
POPULAR = {
    "builtins", "os", "os.path", "sys", "math", "json", "re", "random", "itertools", "functools",
    "collections", "datetime", "time", "pathlib", "string", "str", "list", "dict", "set", "statistics",
    "logging", "subprocess",
}
# fmt: on
"""Modules and types people ask about first."""
POPULAR_WEIGHT = 3
"""How often an epoch holds an answer about one of `POPULAR` or a glossary term; others are there once."""
# fmt: off
FAMILIAR = {
    "builtins", "str", "list", "dict", "set", "collections", "functools", "itertools", "json", "math",
    "os.path", "pathlib", "random", "re", "string", "datetime", "os.listdir", "os.getcwd", "os.remove",
    "os.rename", "os.mkdir", "os.makedirs", "os.environ", "os.walk", "os.getenv", "sys.argv", "sys.exit",
    "sys.path", "subprocess.run", "shutil.copy", "time.sleep", "time.time", "time.perf_counter",
}
FAMILIAR_MODULES = {
    "os", "sys", "time", "subprocess", "shutil", "logging", "threading", "argparse", "asyncio", "csv",
    "copy", "decimal", "dataclasses", "enum", "glob", "hashlib", "heapq", "inspect", "io", "multiprocessing",
    "pickle", "socket", "sqlite3", "statistics", "struct", "tempfile", "textwrap", "typing", "unittest",
    "urllib", "uuid", "zipfile", "contextlib", "bisect", "calendar", "secrets", "types",
}
# fmt: on
FAMILIAR_PAGES = ("reference/compound_stmts", "reference/simple_stmts")
"""What the finishing run teaches again: entries of these homes or names, introductions of these modules,
sections of these pages, and the glossary. It is about as much as the model can keep by heart."""
SECTION_WEIGHT = 2
"""The same for the opening of a section."""
SMALL_TALK_REPEATS = 4
"""How often an epoch holds each wording of each hand-written question."""

DIALOGUES = Path(__file__).with_name("demo_dialogues.txt")

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant",
    "You are a friendly assistant.",
    "Answer briefly.",
    "You are Penstock's demo model.",
    "You answer questions about Python.",
)
SYSTEM_PROMPT_SHARE = 0.2
TURNS = (1, 1, 1, 1, 2, 3)
"""Questions in one conversation, drawn with equal chances."""


@dataclass(frozen=True)
class Conversation:
    """What the chat template renders: messages and, for calls, tools, both as requests have them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Answer:
    """One reply, the questions it answers, how often an epoch holds it (each time under one question), and
    whether the finishing run teaches it again."""

    questions: tuple[str, ...]
    reply: str
    weight: int = 1
    familiar: bool = False


@dataclass
class Corpus:
    """Plain documents, answers from documentation, hand-written answers, documents kept for validation."""

    documents: list[str] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    small_talk: list[Answer] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)

    def add_page(self, page: Page) -> None:
        """Adds the text of a page and what it answers, or keeps the page for validation."""
        if is_held_out(page.name):
            self.held_out.extend(page.documents())
            return
        self.documents.extend(page.documents())
        for entry in page.entries:
            self._add_entry(entry)
        for title, paragraphs in page.openings():
            reply = first_sentences(paragraphs)
            if reply:
                familiar = page.name in FAMILIAR_PAGES
                self.answers.append(
                    Answer(questions_about(title, "section"), reply, SECTION_WEIGHT, familiar)
                )

    def familiar(self) -> Corpus:
        """The small talk (also as documents) and the answers about what people ask first."""
        answers = [replace(answer, weight=1) for answer in self.answers if answer.familiar]
        return Corpus([answer.reply for answer in self.small_talk], answers, self.small_talk, self.held_out)

    def _add_entry(self, entry: Entry) -> None:
        reply = first_sentences(entry.paragraphs)
        if not reply:
            return
        home = entry.name.rpartition(".")[0] or "builtins"
        weight = POPULAR_WEIGHT if home in POPULAR or entry.kind == "term" else 1
        short = entry.signature and len(entry.signature) < SIGNATURE_CHARS
        opening = f"{entry.signature}: " if short else ""
        if entry.kind == "module":
            familiar = entry.name in FAMILIAR | FAMILIAR_MODULES
        else:
            familiar = entry.kind == "term" or home in FAMILIAR or entry.name in FAMILIAR
        questions = questions_about(entry.name, entry.kind)
        self.answers.append(Answer(questions, opening + reply, weight, familiar))


def build(docs: Path | None, library: Path | None = None) -> Corpus:
    """Reads everything.

    `docs` is the folder of Python's HTML documentation that holds `library/`, or None; `library` the folder
    of the standard library, by default the running interpreter's.
    """
    corpus = Corpus(small_talk=read_dialogues())
    if docs is None:
        add_topics(corpus)
    else:
        for folder in DOCS_FOLDERS:
            for path in sorted((docs / folder).glob("*.html")):
                corpus.add_page(read_page(path, f"{folder}/{path.stem}"))
        corpus.add_page(read_page(docs / "glossary.html", "glossary"))
    add_library(corpus, library or Path(sysconfig.get_paths()["stdlib"]))
    return corpus


def is_held_out(name: str) -> bool:
    """Whether the document of this name is kept for validation; depends on the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little") % HELD_OUT_ONE_IN == 0


def first_sentences(paragraphs: list[str], limit: int = ANSWER_CHARS) -> str:
    """The first paragraphs that fit into `limit` characters, or the first sentences of the first one."""
    paragraphs = [re.sub(r" \(see (section )?[A-Z][^()]*\)", "", paragraph) for paragraph in paragraphs]
    taken: list[str] = []
    for paragraph in paragraphs:
        if sum(map(len, taken)) + len(paragraph) > limit:
            break
        taken.append(paragraph)
    cut = len(taken) < len(paragraphs)
    while taken and (taken[-1].endswith(":") or (cut and taken[-1].startswith("- "))):
        taken.pop()
    if taken or not paragraphs:
        return "\n\n".join(taken)
    reply = ""
    for sentence in re.split(r"(?<=[.!?]) +", paragraphs[0]):
        if len(reply) + len(sentence) > limit:
            break
        reply = f"{reply} {sentence}".strip()
    return "" if reply.endswith(":") else reply


def questions_about(name: str, kind: str) -> tuple[str, ...]:
    """The ways to ask about `name`, which is a function, class, module, glossary term or section title."""
    patterns: tuple[str, ...]
    if kind == "section" and name.endswith("?"):
        patterns, name = ("{0}?", "{0}", "{0}?"), name.rstrip("?")
    elif kind == "section":
        words = name.split(" ")
        topic = " ".join(word.lower() if word.istitle() and word != "Python" else word for word in words)
        patterns = ("Explain {1}.", "Tell me about {1}.", "What can you tell me about {1}?", "{0}")
        return tuple(pattern.format(name, topic) for pattern in patterns)
    elif kind == "term":
        a = "an" if name[:1] in "aeiou" else "a"
        patterns = (f"What is {a} {{0}}?", f"what is {a} {{0}}", "What does {0} mean?", "Define {0}.")
    elif kind == "module":
        patterns = (
            *("What is the {0} module?", "What is the {0} module for?", "Tell me about {0}."),
            *("what does the {0} module do?", "Explain the {0} module."),
        )
    else:
        patterns = (
            *("What does {0} do?", "What does {1} do?", "What is {0}?", "Explain {0}."),
            *("How do I use {0}?", "what does {1} do", "Tell me about {0}.", "{1}?"),
        )
    call = f"{name}()" if kind in ("function", "method") else name
    return tuple(pattern.format(name, call) for pattern in patterns)


def add_library(corpus: Corpus, root: Path) -> None:
    """Adds docstrings and comments, each distinct text once; those of public names also as answers."""
    seen: set[str] = set()
    known = {question for answer in corpus.answers for question in answer.questions}
    for name, text in read_library(root):
        paragraphs = plain_paragraphs(text)
        document = "\n\n".join(paragraphs)
        if len(document) < 30 or document in seen:
            continue
        seen.add(document)
        if is_held_out(document):
            corpus.held_out.append(document)
            continue
        corpus.documents.append(document)
        reply = first_sentences(paragraphs)
        public = name and not any(part.startswith("_") for part in name.split("."))
        questions = questions_about(name, "function")
        if public and reply and not known.intersection(questions):
            familiar = name.rpartition(".")[0] in FAMILIAR
            corpus.answers.append(Answer(questions, reply, familiar=familiar))


def add_topics(corpus: Corpus) -> None:
    """Adds the language topics that ship with the interpreter."""
    topics = importlib.import_module("pydoc_data.topics").topics
    for name, text in sorted(topics.items()):
        title, _, body = text.partition("\n")
        paragraphs = plain_paragraphs(body.lstrip("*=-~\n"))
        document = "\n\n".join([clean(title), *paragraphs])
        if is_held_out(name):
            corpus.held_out.append(document)
            continue
        corpus.documents.append(document)
        reply = first_sentences(paragraphs)
        if reply:
            questions = questions_about(clean(title).replace('"', ""), "section")
            corpus.answers.append(Answer(questions, reply, SECTION_WEIGHT))


def read_dialogues(path: Path = DIALOGUES) -> list[Answer]:
    """Hand-written exchanges: `Q:` lines hold ways to ask, separated by ` | `, the `A:` line the reply.

    Raises ValueError naming the line when a line is neither.
    """
    answers: list[Answer] = []
    questions: list[str] = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if line.startswith("Q: "):
            questions += [question.strip() for question in line[3:].split(" | ")]
        elif line.startswith("A: ") and questions:
            answers.append(Answer(tuple(questions), line[3:].replace("\\n", "\n")))
            questions = []
        elif line.strip() and not line.startswith("#"):
            raise ValueError(f"{path.name}:{number}: expected a 'Q: ', 'A: ' or '#' line, got {line!r}")
    return answers


def chats(
    corpus: Corpus, rng: random.Random, small_talk_repeats: int = SMALL_TALK_REPEATS
) -> list[Conversation]:
    """The conversations of one epoch; wording, order and grouping are drawn from `rng`."""
    pairs = [
        (rng.choice(answer.questions), answer.reply)
        for answer in corpus.answers
        for _ in range(answer.weight)
    ]
    for answer in corpus.small_talk * small_talk_repeats:
        pairs.extend((question, answer.reply) for question in answer.questions)
    rng.shuffle(pairs)
    conversations: list[Conversation] = []
    position = 0
    while position < len(pairs):
        turns = rng.choice(TURNS)
        messages = []
        if rng.random() < SYSTEM_PROMPT_SHARE:
            messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
        for question, reply in pairs[position : position + turns]:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
        conversations.append(Conversation(messages))
        position += turns
    return conversations
