"""The table of tool-call formats: one row per format.

Formats that differ only in their markers or their JSON keys are rows of the same class. A new syntax needs a
class in a file of this folder.
"""

from __future__ import annotations

from penstock.serve.parsers.formats.apertus import ApertusCalls
from penstock.serve.parsers.formats.deepseek import DeepSeekCalls
from penstock.serve.parsers.formats.function_tags import FunctionTags
from penstock.serve.parsers.formats.functionary import FunctionaryCalls
from penstock.serve.parsers.formats.gemma4 import Gemma4Calls
from penstock.serve.parsers.formats.glm import GlmCalls
from penstock.serve.parsers.formats.harmony import HarmonyCalls
from penstock.serve.parsers.formats.invoke_calls import DSML, InvokeCalls
from penstock.serve.parsers.formats.json_calls import JsonCalls
from penstock.serve.parsers.formats.kimi_k2 import KimiK2Calls
from penstock.serve.parsers.formats.llama3_json import Llama3Calls
from penstock.serve.parsers.formats.mistral import MistralCalls
from penstock.serve.parsers.formats.pythonic import PythonicCalls
from penstock.serve.parsers.formats.pythonic_lines import PythonicLines
from penstock.serve.parsers.formats.tool_format import ToolFormat

# ParserFactory.choose uses the first row whose hints are all in the chat template. If the templates of one
# format also contain the hints of a second format, the first format therefore precedes the second.
_ROWS: tuple[ToolFormat, ...] = (
    HarmonyCalls(
        name="harmony",
        models="gpt-oss",
        example='<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>',
        hints=("<|channel|>analysis<|message|>",),
        unmarked_starts="t",
    ),
    FunctionaryCalls(
        name="functionary",
        models="Functionary 3.1",
        example='<function=f>{"a": 1}</function>',
        hints=("<function=example_function_name>{",),
        separator="",
    ),
    FunctionTags(
        name="seed_oss",
        models="Seed-OSS",
        example="<seed:tool_call>\n<function=f>\n<parameter=a>1</parameter>\n</function>\n</seed:tool_call>",
        hints=("<seed:tool_call>",),
        separator="\n",
        begin="<seed:tool_call>",
        end="</seed:tool_call>",
        is_padded=False,
    ),
    FunctionTags(
        name="qwen3_coder",
        models="Qwen3-Coder, Qwen3.5, Nemotron 3, Step 3.5",
        example="<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        hints=("<tool_call>", "<function=", "<parameter="),
        separator="\n",
        begin="<tool_call>",
        end="</tool_call>",
        is_padded=True,
    ),
    GlmCalls(
        name="glm",
        models="GLM 4.5 and later; some versions write no line ends",
        example="<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        hints=("<arg_key>",),
        separator="\n",
    ),
    Gemma4Calls(
        name="gemma4",
        models="Gemma 4",
        example='<|tool_call>call:f{a:1,b:<|"|>x<|"|>}<tool_call|>',
        hints=("<|tool_call>call:",),
        separator="",
    ),
    JsonCalls(
        name="apriel",
        models="Apriel",
        example='<tool_calls>[{"name": "f", "arguments": {"a": 1}}]</tool_calls>',
        hints=("<tool_calls>[",),
        begin="<tool_calls>",
        end="</tool_calls>",
    ),
    ApertusCalls(
        name="apertus",
        models="Apertus",
        example='<|tools_prefix|>[{"f": {"a": 1}}]<|tools_suffix|>',
        hints=("<|tools_prefix|>", "<|tools_suffix|>"),
        begin="<|tools_prefix|>",
        end="<|tools_suffix|>",
    ),
    PythonicLines(
        name="olmo3",
        models="OLMo 3; one call on each line",
        example="<function_calls>f(a=1)</function_calls>",
        hints=("<function_calls>", "</function_calls>"),
        begin="<function_calls>",
        end="</function_calls>",
    ),
    KimiK2Calls(
        name="kimi_k2",
        models="Kimi K2; the text before the arguments is the id of the call",
        example="<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
        '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|>',
        hints=("<|tool_calls_section_begin|>",),
    ),
    DeepSeekCalls(
        name="deepseek_v3",
        models="DeepSeek V3 and R1, with the wide bar U+FF5C and with U+2581 as the underscore",
        example="<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>"
        'function<\uff5ctool\u2581sep\uff5c>f\n```json\n{"a": 1}\n```'
        "<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end\uff5c>",
        hints=("<\uff5ctool\u2581calls\u2581begin\uff5c>", "```"),
        is_fenced=True,
    ),
    DeepSeekCalls(
        name="deepseek_v31",
        models="DeepSeek V3.1, with the wide bar U+FF5C and with U+2581 as the underscore",
        example="<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>"
        'f<\uff5ctool\u2581sep\uff5c>{"a": 1}'
        "<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end\uff5c>",
        hints=("<\uff5ctool\u2581calls\u2581begin\uff5c>",),
        is_fenced=False,
    ),
    InvokeCalls(
        name="deepseek_v32",
        models="DeepSeek V3.2, with the wide bar U+FF5C",
        example='<\uff5cDSML\uff5cfunction_calls>\n<\uff5cDSML\uff5cinvoke name="f">\n'
        '<\uff5cDSML\uff5cparameter name="a" string="false">1</\uff5cDSML\uff5cparameter>\n'
        "</\uff5cDSML\uff5cinvoke>\n</\uff5cDSML\uff5cfunction_calls>",
        hints=("\uff5cDSML\uff5c", "dsml_token + 'function_calls>"),
        tag=f"{DSML}function_calls",
        prefix=DSML,
        is_typed=True,
    ),
    InvokeCalls(
        name="deepseek_v4",
        models="DeepSeek V4, with the wide bar U+FF5C",
        example='<\uff5cDSML\uff5ctool_calls>\n<\uff5cDSML\uff5cinvoke name="f">\n'
        '<\uff5cDSML\uff5cparameter name="a" string="false">1</\uff5cDSML\uff5cparameter>\n'
        "</\uff5cDSML\uff5cinvoke>\n</\uff5cDSML\uff5ctool_calls>",
        hints=("\uff5cDSML\uff5c", "dsml_token + 'tool_calls>"),
        tag=f"{DSML}tool_calls",
        prefix=DSML,
        is_typed=True,
    ),
    InvokeCalls(
        name="minimax_m2",
        models="MiniMax M2 and later",
        example='<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
        hints=("<minimax:tool_call>",),
        tag="minimax:tool_call",
    ),
    JsonCalls(
        name="cohere",
        models="Command R7B and later",
        example='<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}]'
        "<|END_ACTION|>",
        hints=("<|START_ACTION|>",),
        begin="<|START_ACTION|>",
        end="<|END_ACTION|>",
        name_key="tool_name",
        arguments_key="parameters",
        first_members='"tool_call_id": "0", ',
    ),
    JsonCalls(
        name="firefunction",
        models="Firefunction 2",
        example='functools[{"name": "f", "arguments": {"a": 1}}]',
        hints=("functools[",),
        begin="functools",
    ),
    JsonCalls(
        name="granite",
        models="Granite 3",
        example='<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]',
        hints=("<|tool_call|>",),
        begin="<|tool_call|>",
    ),
    MistralCalls(
        name="mistral",
        models="Mistral since tokenizer version 11; `[CALL_ID]123456789` may stand before `[ARGS]`",
        example='[TOOL_CALLS]f[ARGS]{"a": 1}',
        hints=("[TOOL_CALLS]", "[ARGS]"),
        separator="",
        id_length=9,
        begin="[TOOL_CALLS]",
    ),
    MistralCalls(
        name="mistral_v3",
        models="Mistral before tokenizer version 11",
        example='[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]',
        hints=("[TOOL_CALLS]",),
        id_length=9,
        begin="[TOOL_CALLS]",
    ),
    PythonicCalls(
        name="lfm2",
        models="LFM2",
        example="<|tool_call_start|>[f(a=1)]<|tool_call_end|>",
        hints=("List of tools: ", "ns.system_prompt"),
        begin="<|tool_call_start|>",
        end="<|tool_call_end|>",
    ),
    Llama3Calls(
        name="llama3_json",
        models="Llama 3.1 to 3.3, with or without `<|python_tag|>`; `;` or white space separates calls; "
        'also `<|python_tag|>f.call(a="b")`',
        example='{"name": "f", "parameters": {"a": 1}}',
        hints=('{"name": function name, "parameters": dictionary',),
        unmarked_starts="{[",
        unmarked_in_text=True,
        begin="<|python_tag|>",
        arguments_key="parameters",
    ),
    PythonicCalls(
        name="pythonic",
        models="Llama 3.2 and 4, as their model cards describe",
        example='[f(a=1, b="x"), g()]',
        hints=("<|python_start|>",),
        unmarked_starts="[",
        unmarked_in_text=True,
        begin="<|python_start|>",
        end="<|python_end|>",
    ),
    JsonCalls(
        name="hermes",
        models="Hermes 2 Pro, Qwen 2 to 3, most ChatML models, and Penstock's demo model",
        example='<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        hints=("<tool_call>", "arguments"),
        separator="\n",
        begin="<tool_call>",
        end="</tool_call>",
        padding="\n",
    ),
)

TOOL_FORMATS: dict[str, ToolFormat] = {row.name: row for row in _ROWS}
