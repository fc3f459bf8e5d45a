"""Chats with tools: a request, the tool call, the result, and a reply that states the result.

The names, descriptions and parameters of the tools are random (``texts/tools.txt``), because users define
their own tools. Random wordings train the model to read the list of tools instead of remembering fixed tools.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .asking import vary_question, vary_typing
from .texts import read_table, request, split_alternatives
from .words import BOOKS, COLORS, NOUNS, pick, plural, some_city, some_name, split_list, strange_word

Message = dict[str, Any]
Schema = dict[str, Any]

TEXT_SCHEMA: Schema = {"type": "string"}
NUMBER_SCHEMA: Schema = {"type": "number"}
UNIT_SCHEMA: Schema = {"type": "string", "enum": ["celsius", "fahrenheit"]}
PARAMETERS: dict[str, dict[str, Schema]] = {
    "get_weather": {"city": TEXT_SCHEMA, "unit": UNIT_SCHEMA},
    "get_time": {"city": TEXT_SCHEMA},
    "add": {"a": NUMBER_SCHEMA, "b": NUMBER_SCHEMA},
    "search_books": {"topic": TEXT_SCHEMA},
    "send_message": {"to": TEXT_SCHEMA, "text": TEXT_SCHEMA},
    "set_alarm": {"time": TEXT_SCHEMA},
}
OPTIONAL_PARAMETERS = {"unit"}
TOPICS = split_list(
    "rivers, cats, the moon, history, cooking, music, gardens, ships, trains, birds, space, art, horses"
)
MESSAGE_TEXTS = split_list(
    "I am late, hello, good morning, dinner is ready, see you tomorrow, happy birthday, call me, "
    "I am at home, thank you, the train is late"
)
WEATHER = split_list("sunny, cloudy, rainy, windy, snowy, foggy")


@dataclass(frozen=True)
class ToolUse:
    """A use of a tool: the user's request, the arguments, the result of the tool, and the reply."""

    request: str
    arguments: dict[str, Any]
    result: dict[str, Any]
    reply: str


def tool_use(section: str, arguments: Schema, result: Schema, choose: Callable[[list[str]], str]) -> ToolUse:
    """Return a use with the wordings of ``requests.txt``. ``choose`` selects and varies the request."""
    requests, replies = request(section, **arguments, **result)
    return ToolUse(choose(requests), arguments, result, replies[0])


def use_get_weather(rng: random.Random) -> ToolUse:
    """Return a use of the weather tool, sometimes with a unit."""
    section, arguments = "use get_weather", {"city": some_city(rng)}
    if rng.random() < 0.15:
        section, arguments["unit"] = "use get_weather with a unit", pick(rng, UNIT_SCHEMA["enum"])
    return tool_use(section, arguments, {}, lambda requests: vary_question(rng, requests))


def use_get_time(rng: random.Random) -> ToolUse:
    """Return a use of the tool for the time in a city."""
    arguments = {"city": some_city(rng)}
    result = {"time": f"{rng.randrange(24):02d}:{rng.randrange(60):02d}"}
    return tool_use("use get_time", arguments, result, lambda requests: vary_question(rng, requests))


def use_add(rng: random.Random) -> ToolUse:
    """Return a use of the tool that adds two numbers below 1000."""
    limit = rng.choice([20, 100, 1000])
    arguments = {"a": rng.randrange(limit), "b": rng.randrange(limit)}
    result = {"result": arguments["a"] + arguments["b"]}
    return tool_use("use add", arguments, result, lambda requests: vary_question(rng, requests))


def use_search_books(rng: random.Random) -> ToolUse:
    """Return a use of the tool that searches books about a topic."""
    arguments = {"topic": pick(rng, [*TOPICS, *TOPICS, *map(plural, NOUNS), strange_word(rng)])}
    result = {"books": [pick(rng, BOOKS)]}
    return tool_use(
        "use search_books", arguments, result, lambda requests: vary_typing(rng, pick(rng, requests))
    )


def use_send_message(rng: random.Random) -> ToolUse:
    """Return a use of the tool that sends a message; its text must be copied exactly."""
    name, first, second = some_name(rng), f"I have the {pick(rng, NOUNS)}", f"where is my {pick(rng, NOUNS)}?"
    third, fourth = f"I am in {some_city(rng)}", f"the {pick(rng, NOUNS)} is {pick(rng, COLORS)}"
    arguments = {"to": name, "text": pick(rng, [*MESSAGE_TEXTS, first, second, third, fourth])}
    return tool_use("use send_message", arguments, {"status": "sent"}, lambda requests: pick(rng, requests))


def use_set_alarm(rng: random.Random) -> ToolUse:
    """Return a use of the tool that sets an alarm."""
    arguments = {"time": f"{rng.randrange(5, 23):02d}:{pick(rng, ['00', '15', '30', '45'])}"}
    return tool_use(
        "use set_alarm", arguments, {"status": "ok"}, lambda requests: vary_typing(rng, pick(rng, requests))
    )


TOOL_USES: dict[str, Callable[[random.Random], ToolUse]] = {
    "get_weather": use_get_weather,
    "get_time": use_get_time,
    "add": use_add,
    "search_books": use_search_books,
    "send_message": use_send_message,
    "set_alarm": use_set_alarm,
}


@dataclass(frozen=True)
class OfferedTool:
    """A tool as a user defines it. ``names`` maps the parameter names of `PARAMETERS` to the user's names."""

    tool: Message
    names: dict[str, str]

    def call(self, arguments: dict[str, Any]) -> Message:
        """Return the assistant's message that calls the tool with these arguments."""
        renamed = {self.names[key]: value for key, value in arguments.items() if key in self.names}
        call = {"type": "function", "function": {"name": self.tool["function"]["name"], "arguments": renamed}}
        return {"role": "assistant", "content": None, "tool_calls": [call]}


def wording(rng: random.Random, section: str, key: str) -> str:
    """Return a random wording of ``key`` in a section of ``tools.txt``."""
    return pick(rng, split_alternatives(read_table("tools", section)[key]))


def reword_tool(rng: random.Random, name: str) -> OfferedTool:
    """Return the tool ``name``.

    In half of the cases, the names of the tool and of its parameters have random wordings. The description of
    the tool always has a random wording.
    """
    properties = PARAMETERS[name]
    keeps_names = rng.random() < 0.5
    if name == "get_weather" and rng.random() < 0.6:
        properties = {"city": TEXT_SCHEMA}
    names = {key: key if keeps_names else wording(rng, "parameter names", key) for key in properties}
    described_properties = {}
    for key, schema in properties.items():
        has_no_description = keeps_names or rng.random() < 0.4
        text = {} if has_no_description else {"description": wording(rng, "parameter descriptions", key)}
        described_properties[names[key]] = schema | text
    required = [names[key] for key in properties if key not in OPTIONAL_PARAMETERS]
    parameters: Schema = {"type": "object", "properties": described_properties, "required": required}
    if rng.random() < 0.15:
        parameters["additionalProperties"] = False
    function: Schema = {
        "name": name if keeps_names else wording(rng, "names", name),
        "description": wording(rng, "descriptions", name),
        "parameters": parameters,
    }
    if rng.random() < 0.1:
        function["strict"] = rng.random() < 0.5
    return OfferedTool({"type": "function", "function": function}, names)


def offered_tools(rng: random.Random, required_tool: str | None) -> tuple[list[Message], OfferedTool]:
    """Return tools in random order, and the tool that the chat uses.

    The used tool is ``required_tool``, or a random tool if ``required_tool`` is None.
    """
    names = rng.sample(list(PARAMETERS), rng.choice([1, 1, 1, 2, 2, 3, 4]))
    if required_tool and required_tool not in names:
        names[rng.randrange(len(names))] = required_tool
    tools_by_name = {name: reword_tool(rng, name) for name in names}
    return [offered.tool for offered in tools_by_name.values()], tools_by_name[required_tool or names[0]]


def weather_result(rng: random.Random, city: str) -> tuple[str, str]:
    """Return a result of a weather tool, and the reply that states it."""
    sky, degrees = pick(rng, WEATHER), rng.randrange(-5, 36)
    sky_field: dict[str, Any] = {pick(rng, ["weather", "weather", "condition", "sky"]): sky}
    degrees_field: dict[str, Any] = {pick(rng, ["temperature", "temperature", "degrees", "temp"]): degrees}
    roll = rng.random()
    if roll < 0.15:
        return pick(rng, [sky, sky.capitalize(), json.dumps(sky_field)]), f"It is {sky} in {city}."
    if roll < 0.35:
        results = [f"{degrees}", f"{degrees} degrees", json.dumps(degrees_field)]
        return pick(rng, results), f"It is {degrees} degrees in {city}."
    weather_fields = sky_field | degrees_field if rng.random() < 0.5 else degrees_field | sky_field
    if rng.random() < 0.2:
        weather_fields = {"city": city, **weather_fields}
    return json.dumps(weather_fields), f"It is {sky} in {city}, with {degrees} degrees."


def tool_chat(rng: random.Random) -> tuple[list[Message], list[Message]]:
    """Return messages and tools of a chat in which a tool is called once or twice."""
    name = pick(rng, [*PARAMETERS, "get_weather", "get_weather"])
    tools, tool = offered_tools(rng, name)
    messages: list[Message] = []
    for _ in range(2 if rng.random() < 0.2 else 1):
        use = TOOL_USES[name](rng)
        messages += [{"role": "user", "content": use.request}, tool.call(use.arguments)]
        if rng.random() < 0.1:
            break  # the chat ends with the call, and the caller would run the tool
        content, reply = json.dumps(use.result), use.reply
        if name == "get_weather":
            content, reply = weather_result(rng, use.arguments["city"])
        messages += [{"role": "tool", "content": content}, {"role": "assistant", "content": reply}]
    return messages, tools
