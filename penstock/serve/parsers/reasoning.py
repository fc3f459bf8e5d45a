"""The table of reasoning formats: one row per format."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningFormat:
    """The markers around reasoning.

    An end marker without a begin marker is dropped. A call ends the reasoning even if the end marker is
    missing.
    """

    name: str
    """The value of ``--reasoning-parser``."""
    begin_markers: tuple[str, ...]
    end_markers: tuple[str, ...]
    dropped_markers: tuple[str, ...] = ()
    """Other markers that are removed from the output, such as markers around the answer."""
    text_between: str = ""
    """Text between the end marker and the output that follows."""
    answer_marker: str = ""
    """Marker before the content, also in an output without reasoning."""
    remark_marker: str = ""
    """Marker before a remark: visible text before a call or before the answer (the channel ``commentary`` of
    harmony). Only formats with an ``answer_marker`` can have a
    remark marker."""
    hints: tuple[str, ...] = ()
    """Texts that every chat template of this format contains. If empty, only ``--reasoning-parser`` selects
    the format."""

    def matches(self, template: str) -> bool:
        """Return whether a chat template contains all hints; False for a format without hints."""
        return bool(self.hints) and all(hint in template for hint in self.hints)

    def is_opened_by(self, prompt: str) -> bool:
        """Return whether a prompt ends with a begin marker, ignoring white space at the end of both."""
        return prompt.rstrip().endswith(tuple(marker.rstrip() for marker in self.begin_markers))


# ParserFactory.choose uses the first row whose hints are all in the chat template, so specific formats come
# first.
REASONING_FORMATS = {
    row.name: row
    for row in (
        ReasoningFormat(
            "harmony",
            ("<|channel|>analysis<|message|>",),
            ("<|end|>",),
            dropped_markers=(
                "<|start|>assistant",
                "<|channel|>final<|message|>",
                "<|channel|>commentary<|message|>",
                "<|return|>",
            ),
            text_between="<|start|>assistant",
            answer_marker="<|channel|>final<|message|>",
            remark_marker="<|channel|>commentary<|message|>",
            hints=("<|channel|>analysis<|message|>",),
        ),
        ReasoningFormat("mistral", ("[THINK]",), ("[/THINK]",), hints=("[THINK]",)),
        ReasoningFormat(
            "cohere",
            ("<|START_THINKING|>",),
            ("<|END_THINKING|>",),
            dropped_markers=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
            hints=("<|START_THINKING|>",),
        ),
        ReasoningFormat("seed_oss", ("<seed:think>",), ("</seed:think>",), hints=("<seed:think>",)),
        ReasoningFormat(
            "gemma", ("<|channel>thought\n",), ("<channel|>",), hints=("<|channel>", "<channel|>")
        ),
        ReasoningFormat("apertus", ("<|inner_prefix|>",), ("<|inner_suffix|>",), hints=("<|inner_prefix|>",)),
        ReasoningFormat(
            "apriel",
            ("Here are my reasoning steps:\n",),
            ("[BEGIN FINAL RESPONSE]",),
            dropped_markers=("[END FINAL RESPONSE]",),
            hints=("[BEGIN FINAL RESPONSE]",),
        ),
        ReasoningFormat(
            "granite",
            ("<think>",),
            ("</think>",),
            dropped_markers=("<response>", "</response>"),
            hints=("<think></think>", "<response></response>"),
        ),
        ReasoningFormat("think", ("<think>",), ("</think>",), hints=("</think>",)),
    )
}


def prompt_opens_reasoning(prompt: str) -> bool:
    """Return whether a rendered prompt ends with the begin marker of any known reasoning format.

    >>> prompt_opens_reasoning("<|im_start|>assistant\\n<think>\\n")
    True
    >>> prompt_opens_reasoning("What is <think>?<|im_end|>\\n<|im_start|>assistant\\n")
    False
    """
    return any(row.is_opened_by(prompt) for row in REASONING_FORMATS.values())
