"""Chats that combine turns: with system messages, several turns, or tools that are not needed."""

import random
from typing import Any

from .about_penstock import IDENTITY_ANSWER, penstock_pair
from .answers import UNKNOWN_REPLIES, greeting, make_pair
from .asking import vary_command, vary_question
from .json_tasks import json_pair
from .odd_inputs import odd_pair
from .stories import make_story
from .texts import request
from .tool_chats import offered_tools, reword_tool, tool_chat
from .words import COLORS, pick, some_city, some_name, with_article

Message = dict[str, Any]
SYSTEM_MESSAGES = [
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "Answer in one sentence.",
    "You are a kind teacher. Answer in one sentence.",
    "Be brief.",
    "Answer in one or two sentences.",
    "You are the demo model of Penstock.",
    "You are a small model that tells stories and answers questions.",
    "Answer politely.",
    "You answer short questions.",
    "Speak simple English.",
    "You are helpful, honest and brief.",
    "Keep your answers short.",
    "You are an assistant.",
]


def turn(user: str, assistant: str) -> list[Message]:
    """Return a question and its answer as two messages."""
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def story_turn(rng: random.Random) -> list[Message]:
    """Return a request for a story, and a story that fits the request."""
    story = make_story(rng, short=True)
    roll = rng.random()
    if roll < 0.3:
        section = "any story"
    elif roll < 0.6:
        section = "story with a hero"
    elif roll < 0.75:
        section = "story about a name"
    else:
        section = "story with a topic"
    requests, _ = request(
        section, a_kind=with_article(story.hero.kind), name=story.hero.name, topic=story.topic
    )
    return turn(vary_command(rng, requests), story.text)


def memory_turns(rng: random.Random) -> list[Message]:
    """Return turns in which the user states a fact, such as a name, and asks for it later."""
    facts = [("my name", some_name(rng)), ("my city", some_city(rng)), ("my color", pick(rng, COLORS))]
    section, value = rng.choice(facts)
    statements, replies = request(section, 0, value=value)
    questions, answers = request(section, 1, value=value)
    messages = turn(pick(rng, statements), replies[0])
    if rng.random() < 0.3:
        messages += turn(*make_pair(rng))
    return messages + turn(vary_question(rng, questions), answers[0])


def any_turn(rng: random.Random) -> list[Message]:
    """Return one turn of a random kind."""
    roll = rng.random()
    if roll < 0.68:
        return turn(*make_pair(rng))
    if roll < 0.85:
        return turn(*penstock_pair(rng))
    if roll < 0.90:
        return turn(*json_pair(rng))
    if roll < 0.93:
        return turn(*odd_pair(rng))
    return story_turn(rng)


def with_system(rng: random.Random, messages: list[Message], probability: float = 0.25) -> list[Message]:
    """Return the chat, with a system message at its beginning with ``probability``."""
    if rng.random() >= probability:
        return messages
    return [{"role": "system", "content": pick(rng, SYSTEM_MESSAGES)}, *messages]


def several_turns(rng: random.Random) -> list[Message]:
    """Return a chat of two to four turns, which sometimes begins with a greeting."""
    if rng.random() < 0.25:
        return with_system(rng, memory_turns(rng))
    messages = turn(*greeting(rng)) if rng.random() < 0.4 else []
    for _ in range(rng.randrange(2, 4)):
        messages += any_turn(rng)
    return with_system(rng, messages)


def chat_with_tools(rng: random.Random) -> tuple[list[Message], list[Message]]:
    """Return a chat with a list of tools. One chat in five needs none of them."""
    if rng.random() < 0.8:
        messages, tools = tool_chat(rng)
        if rng.random() < 0.1:
            messages += turn_without_tool(rng)
    else:
        messages, tools = turn_without_tool(rng), offered_tools(rng, None)[0]
    return with_system(rng, messages), tools


def turn_without_tool(rng: random.Random) -> list[Message]:
    """Return a turn that needs no tool: a greeting, or a question about Penstock or the model."""
    if rng.random() < 0.2:
        return turn(vary_question(rng, ["Who are you?", "What is your name?"]), IDENTITY_ANSWER)
    return turn(*(greeting(rng) if rng.random() < 0.4 else penstock_pair(rng)))


def missing_tool(rng: random.Random) -> tuple[list[Message], list[Message]]:
    """Return a chat with a list of one tool, in which the request needs another tool."""
    city = some_city(rng)
    if rng.random() < 0.5:
        section, tool = "missing weather tool", pick(rng, ["add", "set_alarm", "search_books"])
    else:
        section, tool = "missing time tool", pick(rng, ["add", "send_message", "search_books"])
    requests, _ = request(section, city=city)
    return turn(vary_question(rng, requests), pick(rng, UNKNOWN_REPLIES[:2])), [reword_tool(rng, tool).tool]
