"""Conversations with tool calls, on which the demo model learns the format of its chat template.

All text is generated from the tables below (this project's licence). A model of this size learns to copy
names, arguments and results out of the prompt, not what tools are good for: most tools and most values are
made up anew for every conversation, so that nothing can be learnt by heart.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

from demo_corpus import SYSTEM_PROMPTS, Answer, Conversation

TWO_TOOLS_SHARE = 0.5
"""Share of conversations in which the question's tool is not the only one."""
UNRELATED_SHARE = 0.25
"""Share of conversations whose question needs no tool: its answer is text."""
TWO_CALLS_SHARE = 0.12
FOLLOW_UP_SHARE = 0.25
FORCED_SHARE = 0.07
"""Share of conversations that end with calls as the grammar of `tool_choice: required` has them."""
SYSTEM_SHARE = 0.4
SYSTEM_TEXTS = (
    *SYSTEM_PROMPTS,
    *("Use the tools.", "You are a helpful assistant with tools.", "You can call tools.", "Be concise."),
    *("You are a weather assistant.", "You are an agent. Call a tool if it helps.", "Always use tools."),
)
RESULT = "The result is {}"
"""What the model says after a tool's result."""
TOOL_TOPICS = ("weather", "time", "2", "two", "capital", "ranslate", "joke", "French", "Count", "count")
"""A question that contains one of these is not asked as one that needs no tool."""

# fmt: off
CITIES = (
    "Paris", "London", "Berlin", "Tokyo", "Bern", "Rome", "Madrid", "Vienna", "Oslo", "San Francisco",
    "New York", "Zurich", "Sydney", "Boston", "Lisbon", "Dublin", "Prague", "Athens", "Cairo", "Delhi",
    "Seattle", "Chicago", "Amsterdam", "Helsinki", "Warsaw", "Beijing", "Toronto", "Munich", "Geneva", "Lima",
)
NAMES = (
    "Ada", "Guido", "Alice", "Bob", "Carol", "Dave", "Eve", "Grace", "Linus", "Marie", "Anna", "Peter",
    "Tom", "Lena", "Max", "Nina", "Paul", "Rosa", "Sam", "Zoe",
)
WORDS = (
    "water", "pipe", "river", "music", "cheese", "bread", "train", "garden", "history", "python", "poetry",
    "football", "pizza", "coffee", "winter", "summer", "castle", "bridge", "silver", "copper", "rocket",
    "planet", "forest", "island", "market", "letter", "window", "kitchen", "bicycle", "violin", "engine",
    "streaming", "library", "turbine", "energy", "tokens", "models", "news", "restaurants", "hotels",
)
LANGUAGES = ("French", "German", "Spanish", "Italian", "Dutch", "Japanese", "English", "Greek")
EXTENSIONS = ("txt", "py", "csv", "json", "md", "log")
SKIES = ("sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "clear", "warm", "cold", "dry")
VERBS = (
    "get", "find", "list", "show", "open", "close", "start", "stop", "send", "delete", "update", "check",
    "count", "load", "save", "print", "move", "copy", "fetch", "read", "create", "set", "run", "test",
    "order", "book", "call", "search", "look up", "look for",
)
NOUNS = (
    "record", "user", "order", "file", "ticket", "invoice", "flight", "hotel", "song", "movie", "book",
    "recipe", "price", "stock", "country", "product", "customer", "message", "email", "task", "job", "light",
    "door", "event", "meeting", "account", "server", "process", "log", "table", "city", "person", "word",
    "number", "page", "note", "photo", "route", "score", "game", "package", "parcel", "contact", "report",
)
# fmt: on


@dataclass(frozen=True)
class Topic:
    """Something people ask for, with a tool that does it. Each tuple but `arguments` holds alternatives."""

    names: tuple[str, ...]
    about: tuple[str, ...]
    arguments: tuple[tuple[tuple[str, ...], str], ...]
    """(names of the argument, kind of its value), see `draw`."""
    questions: tuple[str, ...]
    """{0}, {1} … stand for the values."""
    results: tuple[str, ...]
    """{sky}, {n} and {word} stand for drawn values, {0} … for those of the arguments."""


TOPICS = (
    Topic(
        ("get_weather", "weather", "get_current_weather", "weather_lookup", "fetch_weather"),
        ("Get the weather.", "Get the current weather in a city.", "The weather of a place.", ""),
        ((("city", "location", "place"), "city"),),
        (
            *("What is the weather in {0}?", "What's the weather like in {0}?", "Weather in {0}?"),
            *("How is the weather in {0} today?", "Is it raining in {0}?", "weather {0}"),
            *("What is the weather like in {0}?", "Tell me the weather in {0}.", "Is it cold in {0}?"),
        ),
        ("{sky}", "{sky}, {n} degrees", '{{"sky": "{sky}", "degrees": {n}}}', "{n} degrees and {sky} in {0}"),
    ),
    Topic(
        ("get_weather", "weather", "get_current_weather"),
        ("Get the weather.", "Get the current weather in a city."),
        ((("city", "location"), "city"), (("unit", "units"), "unit")),
        ("What is the weather in {0} in {1}?", "Weather in {0}, in {1} please."),
        ("{sky}, {n} degrees", '{{"temperature": {n}, "unit": "{1}"}}'),
    ),
    Topic(
        ("add", "add_numbers", "sum", "plus"),
        ("Add two numbers.", "Adds two numbers", "The sum of two numbers.", ""),
        ((("a", "x", "first"), "number"), (("b", "y", "second"), "number")),
        (
            *("What is {0} + {1}?", "What is {0} plus {1}?", "Add {0} and {1}.", "{0} + {1}"),
            *("add {0} to {1}", "Calculate {0} + {1}.", "Please add {0} and {1}", "What's {0}+{1}?"),
        ),
        ("{n}", "{n}.0", '{{"result": {n}}}'),
    ),
    Topic(
        ("multiply", "multiply_numbers", "product", "times"),
        ("Multiply two numbers.", "Multiplies two numbers", "The product of two numbers.", ""),
        ((("a", "x", "first"), "number"), (("b", "y", "second"), "number")),
        (
            *("What is {0} * {1}?", "What is {0} times {1}?", "Multiply {0} by {1}.", "{0} * {1}"),
            *("multiply {0} and {1}", "Calculate {0} * {1}.", "What's {0} multiplied by {1}?"),
        ),
        ("{n}", "{n}.0", '{{"result": {n}}}'),
    ),
    Topic(
        ("calculator", "calculate", "evaluate", "eval_expression"),
        ("Evaluate an expression.", "A calculator.", "Calculates an expression.", ""),
        ((("expression", "expr", "input"), "expression"),),
        ("What is {0}?", "Calculate {0}.", "calculate {0}", "How much is {0}?", "Compute {0} please."),
        ("{n}", '{{"value": {n}}}'),
    ),
    Topic(
        ("get_time", "current_time", "get_current_time", "time_in"),
        ("Get the time.", "The current time in a city.", "Get the current time.", ""),
        ((("city", "timezone", "location"), "city"),),
        ("What time is it in {0}?", "what is the time in {0}?", "Time in {0}?", "Tell me the time in {0}."),
        ("{n}:{n}", "It is {n} o'clock in {0}", '{{"time": "{n}:{n}"}}'),
    ),
    Topic(
        ("get_time", "now", "get_date", "current_time", "roll_die", "roll_dice"),
        ("Get the time.", "The current date and time.", "Roll a die.", ""),
        (),
        (
            *(
                "What time is it?",
                "What is the date today?",
                "Roll a die.",
                "What's the time?",
                "Roll the dice",
            ),
            *("what time is it", "Which day is it?", "Tell me the time.", "Roll a six-sided die", "Now?"),
        ),
        ("{n}", "{n}:{n}", '{{"value": {n}}}'),
    ),
    Topic(
        ("search", "web_search", "search_web", "google", "lookup", "search_docs"),
        ("Search the web.", "Look something up.", "Search for a text.", ""),
        ((("query", "q", "text", "term"), "words"),),
        ("Search for {0}.", "Look up {0}.", "search {0}", "Find {0} on the web.", "Please search for {0}"),
        ("{word} and {word}", '["{word}", "{word}"]', "no {word} found", '{{"title": "{word}"}}'),
    ),
    Topic(
        ("read_file", "open_file", "cat", "get_file"),
        ("Read a file.", "The text of a file.", ""),
        ((("path", "filename", "file"), "file"),),
        ("Read {0}.", "What is in {0}?", "Show me the file {0}.", "open {0}", "Please read the file {0}"),
        ("{word} {word}", "{word}", "no such file"),
    ),
    Topic(
        ("translate", "translate_text"),
        ("Translate a text.", "Translate text to another language.", ""),
        ((("text",), "words"), (("language", "target"), "language")),
        ("Translate {0} to {1}.", "Translate {0} into {1}", "How do you say {0} in {1}?"),
        ("{word}", '{{"text": "{word}"}}'),
    ),
    Topic(
        ("send_email", "send_message", "notify", "write_to"),
        ("Send a message.", "Send an email to someone.", ""),
        ((("to", "recipient", "name"), "name"), (("text", "body", "message"), "words")),
        ("Send {0} the text {1}.", "Write to {0}: {1}", "Tell {0} that {1}", "Send {0} a message: {1}"),
        ("sent", "ok", '{{"status": "sent"}}', "message {n} sent"),
    ),
    Topic(
        ("count_letters", "letter_count", "word_length", "get_length", "reverse", "upper"),
        ("Count the letters of a word.", "The length of a text.", "Reverse a text."),
        ((("word", "text", "string"), "word"),),
        ("How many letters are in {0}?", "How long is {0}?", "Reverse {0}.", "Count the letters in {0}."),
        ("{n}", "{word}", '{{"length": {n}}}'),
    ),
    Topic(
        ("get_user", "user_info", "lookup_user", "get_person"),
        ("Look up a person.", "Get a user by name.", ""),
        ((("name", "user", "username"), "name"),),
        ("Who is {0}?", "Get the user {0}.", "Look up {0}.", "How old is {0}?", "Tell me about {0}."),
        ('{{"name": "{0}", "age": {n}}}', "{0} is {n} years old", "{0} likes {word}"),
    ),
)


def made_up(rng: random.Random) -> Topic:
    """A topic of random words: its tool can only be found by copying."""
    verb, noun = rng.choice(VERBS), rng.choice(NOUNS)
    if rng.random() < 0.3:
        noun = f"{rng.choice(WORDS)} {noun}"
    words = f"{verb} {noun}"
    name = words.replace(" ", "_")
    if rng.random() < 0.25:
        first, *rest = words.split()
        name = first + "".join(word.title() for word in rest)
    kinds = rng.sample(
        (
            *((("id", "number", "index", "count", f"{noun.split()[-1]}_id"), "number"),) * 2,
            *((("name", "title", "key", f"{noun.split()[-1]}_name"), "word"),) * 2,
            (("text", "query", "value", "question"), "words"),
            (("city", "place", "country", "destination"), "city"),
            (("person", "owner", "author", "to"), "name"),
            (("path", "file", "folder"), "file"),
        ),
        rng.choice((0, 1, 1, 1, 1, 2, 2)),
    )
    about = (f"{verb.capitalize()} the {noun}.", f"{verb.capitalize()} a {noun}.", "", f"{noun} by {verb}")
    if not kinds:
        questions: tuple[str, ...] = (
            *(f"{verb.capitalize()} the {noun}.", f"Please {verb} the {noun}", f"{verb} {noun}"),
            *(f"What is the {noun}?", f"What's the current {noun}?", f"Which {noun} is it?"),
        )
    elif len(kinds) == 1:
        questions = (
            *(f"{verb.capitalize()} the {noun} {{0}}.", f"Please {verb} the {noun} {{0}}"),
            *(f"Can you {verb} the {noun} of {{0}}?", f"{verb} {noun} {{0}}", f"I want to {verb} {{0}}."),
            *(f"What is the {noun} of {{0}}?", f"Which {noun} has {{0}}?"),
        )
    else:
        questions = (
            *(f"{verb.capitalize()} the {noun} {{0}} for {{1}}.", f"{verb} {noun} {{0}} with {{1}}"),
            *(f"Please {verb} the {noun} with {{0}} and {{1}}.", f"Can you {verb} {{0}} and {{1}}?"),
        )
    results = (
        "ok",
        "{n}",
        "done",
        "{word} {word}",
        '{{"id": {n}, "name": "{word}"}}',
        '{{"ok": true}}',
        "{word}",
    )
    return Topic((name,), about, tuple(kinds), questions, results)


def draw(kind: str, rng: random.Random) -> Any:
    """A value of this kind: a number for `number`, otherwise a text."""
    match kind:
        case "number":
            return rng.randrange(10 ** rng.choice((1, 2, 2, 3, 4)))
        case "city":
            return rng.choice(CITIES) if rng.random() < 0.6 else invented(rng).title()
        case "name":
            return rng.choice(NAMES) if rng.random() < 0.6 else invented(rng).title()
        case "unit":
            return rng.choice(("celsius", "fahrenheit"))
        case "language":
            return rng.choice(LANGUAGES)
        case "file":
            return f"{draw('word', rng)}.{rng.choice(EXTENSIONS)}"
        case "expression":
            numbers = [
                str(rng.randrange(10 ** rng.choice((1, 2, 2, 3)))) for _ in range(rng.choice((2, 2, 3)))
            ]
            return rng.choice((" + ", " * ", " - ", "+", "*", " / ")).join(numbers)
        case "words":
            return " ".join(draw("word", rng) for _ in range(rng.choice((1, 2, 2, 3))))
    return rng.choice(WORDS + NOUNS) if rng.random() < 0.7 else invented(rng)


def invented(rng: random.Random) -> str:
    """A word that does not exist."""
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.choice((2, 2, 3))))


@dataclass(frozen=True)
class DrawnTool:
    """One wording of a topic's tool."""

    topic: Topic
    name: str
    arguments: tuple[str, ...]
    about: str

    @classmethod
    def of(cls, topic: Topic, rng: random.Random) -> DrawnTool:
        names = [rng.choice(names) for names, _ in topic.arguments]
        return cls(topic, rng.choice(topic.names), tuple(names), rng.choice(topic.about))

    def definition(self, rng: random.Random) -> dict[str, Any]:
        """The tool as requests have it."""
        kinds = [kind for _, kind in self.topic.arguments]
        number = rng.choice(("number", "integer"))
        properties: dict[str, Any] = {
            name: {"type": number if kind == "number" else "string"}
            for name, kind in zip(self.arguments, kinds, strict=True)
        }
        if "unit" in kinds and rng.random() < 0.5:
            properties[self.arguments[kinds.index("unit")]]["enum"] = ["celsius", "fahrenheit"]
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.about, "parameters": parameters},
        }

    def call(self, values: list[Any]) -> dict[str, Any]:
        """A call with these values, as messages have it."""
        arguments = dict(zip(self.arguments, values, strict=True))
        return {"type": "function", "function": {"name": self.name, "arguments": arguments}}


def tool_chats(plain: list[Answer], count: int, rng: random.Random) -> list[Conversation]:
    """`count` conversations; `plain` are exchanges for questions that need no tool."""
    unrelated = [
        (question, answer.reply)
        for answer in plain
        for question in answer.questions
        if not any(topic in question for topic in TOOL_TOPICS)
    ]
    return [_conversation(unrelated, rng) for _ in range(count)]


def _conversation(unrelated: list[tuple[str, str]], rng: random.Random) -> Conversation:
    topic = rng.choice(TOPICS) if rng.random() < 0.5 else made_up(rng)
    tools = [DrawnTool.of(topic, rng)]
    while rng.random() < TWO_TOOLS_SHARE and len(tools) < 4:
        other = DrawnTool.of(rng.choice(TOPICS) if rng.random() < 0.5 else made_up(rng), rng)
        if other.topic is not topic and not any(_alike(other, tool) for tool in tools):
            tools.append(other)
    shown = rng.sample(tools, len(tools))
    messages: list[dict[str, Any]] = []
    if rng.random() < SYSTEM_SHARE:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_TEXTS)})
    if rng.random() < UNRELATED_SHARE:
        question, reply = rng.choice(unrelated)
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": reply}]
    elif rng.random() < FORCED_SHARE:
        question, answer, *_ = _exchange(tools[0], rng)
        messages += [question, {"role": "assistant", "content": _forced(answer["tool_calls"])}]
        return Conversation(messages, [tool.definition(rng) for tool in shown])
    else:
        messages += _exchange(tools[0], rng)
    if rng.random() < FOLLOW_UP_SHARE:
        messages += _exchange(rng.choice(tools), rng)
    return Conversation(messages, [tool.definition(rng) for tool in shown])


def _forced(calls: list[dict[str, Any]]) -> str:
    """Calls as a list, which is the same for all models."""
    functions = [call["function"] for call in calls]
    return json.dumps([{"name": each["name"], "parameters": each["arguments"]} for each in functions])


def _alike(one: DrawnTool, other: DrawnTool) -> bool:
    """Whether a question for one tool may be meant for the other."""
    stems = [set(tool.name.lower().replace("get_", "").split("_")) for tool in (one, other)]
    return bool(stems[0] & stems[1]) or one.topic.questions[0] == other.topic.questions[0]


def _exchange(tool: DrawnTool, rng: random.Random) -> list[dict[str, Any]]:
    """A question, the call or calls for it, their results, and the answer."""
    kinds = [kind for _, kind in tool.topic.arguments]
    calls = [[draw(kind, rng) for kind in kinds]]
    question = rng.choice(tool.topic.questions).format(*calls[0])
    if len(kinds) == 1 and rng.random() < TWO_CALLS_SHARE:
        calls.append([draw(kinds[0], rng)])
        question = rng.choice(tool.topic.questions).format(f"{calls[0][0]} and {calls[1][0]}")
    results = [_result(tool.topic, values, rng) for values in calls]
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [tool.call(values) for values in calls]},
        *({"role": "tool", "content": result} for result in results),
        {"role": "assistant", "content": RESULT.format(" and ".join(results)) + "."},
    ]


def _result(topic: Topic, values: list[Any], rng: random.Random) -> str:
    # The same number twice is as good as two: it is copied.
    numbers = {"n": rng.randrange(10 ** rng.choice((1, 2, 3, 4))), "word": draw("word", rng)}
    return rng.choice(topic.results).format(*values, sky=rng.choice(SKIES), **numbers)


def show(count: int = 5) -> None:
    """Prints a few conversations."""
    rng = random.Random(0)
    for chat in tool_chats([Answer(("Hi?",), "Hello.")], count, rng):
        print(json.dumps(chat.messages, indent=1), json.dumps(chat.tools))


if __name__ == "__main__":
    show()
