"""What the demo asks: prompts of different lengths, some of which share a long beginning."""

from typing import NamedTuple

_GUIDE = (
    "You are the guide of a small museum of tools. Visitors are curious and in no hurry. Answer in plain words, "
    "name one thing that can be touched or heard, and never mention prices. If you don't know, say so and offer a guess."
)
_EDITOR = (
    "You edit short texts for a village newspaper. Keep sentences short, keep the facts, and leave out every adjective "
    "that does no work."
)


class Conversation(NamedTuple):
    """A request of the demo."""

    request_id: str
    messages: list[dict[str, str]]


def _ask(request_id: str, question: str, system: str | None = None) -> Conversation:
    messages = [{"role": "system", "content": system}] if system else []
    return Conversation(request_id, [*messages, {"role": "user", "content": question}])


CONVERSATIONS = (
    _ask("guide-hammer", "Why does a hammer have a wooden handle?", _GUIDE),
    _ask("guide-clock", "How does a pendulum keep a clock honest?", _GUIDE),
    _ask("guide-loom", "What did people sing at a loom, and why did it help them keep time?", _GUIDE),
    _ask("guide-saw", "Which of your saws would you take to an island?", _GUIDE),
    _ask("guide-kiln", "How did a potter know that the kiln was hot enough before there were thermometers?", _GUIDE),
    _ask(
        "editor-fair", "Write two sentences about the harvest fair, which was moved indoors because of rain.", _EDITOR
    ),
    _ask("editor-bridge", "Write two sentences about the footbridge, which opens again on Monday.", _EDITOR),
    _ask("editor-owl", "Write a headline and one sentence about an owl that moved into the bell tower.", _EDITOR),
    _ask("sky", "Why is the sky blue?"),
    _ask("count", "Count from one to twelve in words."),
    _ask("river", "Tell me a story about a river that wanted to see the mountains again."),
    _ask("bread", "Explain to a ten-year-old what yeast does in bread dough."),
    _ask("code", "Write a Python function that returns the largest of three numbers."),
    _ask(
        "plan",
        "I have one free day in a town that I have never seen. I like quiet streets, old books and soup. I walk slowly, "
        "I wake up early, and my train leaves at nine in the evening. Make a plan for the day, hour by hour.",
    ),
    _ask("moon", "What would change on Earth if the Moon were twice as far away?"),
    _ask(
        "letter",
        "Write a letter to a neighbour whose apple tree leans over my fence. I like the tree, I like the apples even "
        "more, and I would like to ask whether I may keep those that fall on my side, and return the favour with jam.",
    ),
    _ask("haiku", "Write a haiku about a lighthouse in fog."),
    _ask("sleep", "Give me three reasons to go to bed early."),
)
