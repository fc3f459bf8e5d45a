"""Published chat templates: formats, parsing of calls that templates render, prompts that open reasoning."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.call_formats import SINGLE_CALL_FORMATS, TOOLS, Call, collect_calls, parse

from penstock.errors import InputError
from penstock.serve.parsers import Content, ParserFactory, Reasoning
from penstock.text.chat_template import ChatTemplate

ROOT = Path(__file__).resolve().parents[3]
TEMPLATES = ROOT.parent / "shared" / "data" / "chat_templates"
if not TEMPLATES.is_dir():
    pytest.skip("needs the real chat templates in ../shared/data", allow_module_level=True)

NO_FORMATS = (None, None)
EXPECTED_FORMATS: dict[str, tuple[str | None, str | None]] = {
    "granite-3.0-instruct": ("granite", None),
    "qwen2.5-instruct": ("hermes", None),
    "Apertus-8B-Instruct": ("apertus", "apertus"),
    "Apriel-1.6-15b-Thinker-fixed": ("apriel", "apriel"),
    "Bielik-11B-v3.0-Instruct": ("hermes", "think"),
    "ByteDance-Seed-OSS": ("seed_oss", "seed_oss"),
    "Cohere2MoE": ("cohere", "cohere"),
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": ("cohere", "cohere"),
    "GLM-4.6": ("glm", "think"),
    "GLM-4.7-Flash": ("glm", "think"),
    "GLM-5.2": ("glm", "think"),
    "HuggingFaceTB-SmolLM3-3B": (None, "think"),
    "Kimi-K2-Instruct": ("kimi_k2", None),
    "Kimi-K2-Thinking": ("kimi_k2", "think"),
    "LFM2-8B-A1B": ("lfm2", None),
    "LFM2.5-Instruct": ("lfm2", "think"),
    "MiMo-VL": ("hermes", None),
    "MiroThinker": ("hermes", "think"),
    "Mistral-Small-3.2-24B-Instruct-2506": ("mistral", None),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": ("qwen3_coder", "think"),
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": ("hermes", None),
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": ("hermes", None),
    "Qwen-QwQ-32B": ("hermes", "think"),
    "Qwen-Qwen2.5-7B-Instruct": ("hermes", None),
    "Qwen-Qwen3-0.6B": ("hermes", "think"),
    "Qwen3-Coder": ("qwen3_coder", None),
    "Qwen3.5-4B": ("qwen3_coder", "think"),
    "Reka-Edge": ("hermes", "think"),
    "StepFun3.5-Flash": ("qwen3_coder", "think"),
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": ("deepseek_v3", "think"),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": ("deepseek_v3", "think"),
    "deepseek-ai-DeepSeek-V3.1": ("deepseek_v31", "think"),
    "deepseek-ai-DeepSeek-V3.2": ("deepseek_v32", "think"),
    "deepseek-ai-DeepSeek-V4": ("deepseek_v4", "think"),
    "fireworks-ai-llama-3-firefunction-v2": ("firefunction", None),
    "google-gemma-4-31B-it-interleaved": ("gemma4", "gemma"),
    "google-gemma-4-31B-it": ("gemma4", "gemma"),
    "ibm-granite-granite-3.3-2B-Instruct": ("granite", "granite"),
    "llama-cpp-deepseek-r1": ("deepseek_v3", "think"),
    "llama-cpp-rwkv-world": (None, "think"),
    "meetkai-functionary-medium-v3.1": ("functionary", None),
    "meta-llama-Llama-3.1-8B-Instruct": ("llama3_json", None),
    "meta-llama-Llama-3.2-3B-Instruct": ("llama3_json", None),
    "meta-llama-Llama-3.3-70B-Instruct": ("llama3_json", None),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("mistral", "mistral"),
    "mistralai-Mistral-Nemo-Instruct-2407": ("mistral_v3", None),
    "moonshotai-Kimi-K2": ("kimi_k2", None),
    "openai-gpt-oss-120b": ("harmony", "harmony"),
    "stepfun-ai-Step-3.5-Flash": ("qwen3_coder", "think"),
    "unsloth-Apriel-1.5": ("apriel", "apriel"),
    "unsloth-mistral-Devstral-Small-2507": ("mistral", None),
    "gemma4_31b_chat_template": ("gemma4", "gemma"),
    "nemotron3nano_chat_template": ("qwen3_coder", "think"),
    "qwen38_chat_template": ("qwen3_coder", "think"),
}
# Tokens that end an output and are not part of the output's text.
END_TOKENS = (
    "</s>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<|end|>",
)
END_TOKENS += (
    "<|tool_response>",
    "<turn|>",
    "<|end_of_text|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|user|>",
    "<|observation|>",
    "<sep>",
)
# Templates that need variables which the test does not set, use features that the sandbox forbids, or render
# no calls.
NOT_PARSED_TEMPLATES = {
    "ByteDance-Seed-OSS",
    "Kimi-K2-Instruct",
    "Kimi-K2-Thinking",
    "MiroThinker",
    "llama-cpp-deepseek-r1",
}
NOT_PARSED_TEMPLATES |= {"fireworks-ai-llama-3-firefunction-v2", "granite-3.0-instruct"}
NOT_PARSED_TEMPLATES |= {"ibm-granite-granite-3.3-2B-Instruct", "LFM2-8B-A1B", "LFM2.5-Instruct"}
NOT_PARSED_TEMPLATES |= {"deepseek-ai-DeepSeek-R1-Distill-Llama-8B"}
TEMPLATES_WITH_CALLS = sorted(
    name for name, (tools, _) in EXPECTED_FORMATS.items() if tools and name not in NOT_PARSED_TEMPLATES
)


def read_templates() -> dict[str, str]:
    return {path.name.partition(".jinja")[0]: path.read_text() for path in TEMPLATES.rglob("*.jinja*")}


def test_each_template_has_the_expected_formats() -> None:
    parsers = {name: ParserFactory.choose(source) for name, source in read_templates().items()}
    selected_formats = {
        name: (parser_factory.tool_format_name, parser_factory.reasoning_format_name)
        for name, parser_factory in parsers.items()
    }
    assert {
        name: formats for name, formats in selected_formats.items() if formats != NO_FORMATS
    } == EXPECTED_FORMATS


def test_the_demo_model_has_the_expected_formats() -> None:
    template = (ROOT / "penstock" / "demo" / "chat_template.jinja").read_text()
    parsers = ParserFactory.choose(template)
    assert (parsers.tool_format_name, parsers.reasoning_format_name) == ("hermes", None)


@pytest.mark.parametrize("num_calls", [1, 2])
@pytest.mark.parametrize("name", TEMPLATES_WITH_CALLS)
def test_calls_rendered_by_a_template_are_parsed(name: str, num_calls: int) -> None:
    source = read_templates()[name]
    template = ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"}, name)
    parsers = ParserFactory.choose(source)
    text = 'He said "no" {1}\n\nthen <b>\u00e9</b> <tool_call>'
    calls = [
        Call("search", {"text": text, "count": 3, "exact": True, "tags": ["a", {"b": None}]}),
        Call("now"),
    ]
    user = {"role": "user", "content": "Find it."}
    answer = {"role": "assistant", "content": "", "tool_calls": make_tool_calls(calls[:num_calls])}
    if num_calls > 1 and "only supports single tool-calls" in source:
        with pytest.raises(InputError, match="single tool-calls"):
            template.render([user, answer], TOOLS)
        return
    if num_calls > 1 and parsers.tool_format_name in SINGLE_CALL_FORMATS:
        pytest.skip("the template renders only one call")
    rendered_text = template.render([user, answer], TOOLS, {"add_generation_prompt": False})
    prompt = template.render([user], TOOLS)
    start = next(
        (index for index, (a, b) in enumerate(zip(rendered_text, prompt, strict=False)) if a != b),
        len(prompt),
    )
    if "<" in rendered_text[max(0, start - 10) : start].rpartition(">")[2]:
        start = rendered_text.rindex("<", 0, start)  # do not start within a marker
    answer_text = rendered_text[start:]
    for end in END_TOKENS:
        answer_text = answer_text.partition(end)[0]
    in_reasoning = parsers.prompt_opens_reasoning(rendered_text[:start])
    events = parse(parsers.new(tools=TOOLS, in_reasoning=in_reasoning), answer_text, (3,))
    assert collect_calls(events) == calls[:num_calls]
    assert not [event for event in events if isinstance(event, Content | Reasoning)]


def make_tool_calls(calls: list[Call]) -> list[dict[str, object]]:
    return [
        {
            "id": f"abcdefgh{index}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for index, call in enumerate(calls)
    ]


@pytest.mark.parametrize(
    ("name", "options", "opens_reasoning"),
    [
        ("Qwen-Qwen3-0.6B", {}, False),
        ("Qwen-Qwen3-0.6B", {"enable_thinking": False}, False),
        ("Qwen-QwQ-32B", {"enable_thinking": True}, True),
        ("Qwen3.5-4B", {}, True),
        ("Qwen3.5-4B", {"enable_thinking": False}, False),
        ("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", {}, True),
        ("deepseek-ai-DeepSeek-V3.1", {"thinking": True}, True),
        ("deepseek-ai-DeepSeek-V3.1", {}, False),
        ("GLM-4.7-Flash", {}, True),
        ("GLM-4.6", {}, False),
        ("Cohere2MoE", {"reasoning": True}, True),
        ("Cohere2MoE", {"reasoning": False}, False),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", {}, True),
        ("Apriel-1.6-15b-Thinker-fixed", {}, True),
        ("google-gemma-4-31B-it", {}, False),
        ("Qwen-Qwen2.5-7B-Instruct", {}, False),
    ],
)
def test_prompts_that_end_within_reasoning_are_detected(
    name: str, options: dict[str, bool], opens_reasoning: bool
) -> None:
    source = read_templates()[name]
    template = ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"}, name)
    user = {"role": "user", "content": "What do <think> and </think> mean?"}
    prompt = template.render([user], options={"add_generation_prompt": True, **options})
    assert ParserFactory.choose(source).prompt_opens_reasoning(prompt) is opens_reasoning
