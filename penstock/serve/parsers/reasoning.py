"""How models mark what they think before they answer: one row a format."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningFormat:
    """The markers around reasoning.

    An end without a beginning is dropped; a call ends the reasoning before it, with or without an end marker.
    """

    name: str
    begins: tuple[str, ...]
    ends: tuple[str, ...]
    dropped: tuple[str, ...] = ()
    """Markers around the answer itself."""
    between: str = ""
    """Stands between the end of the reasoning and what follows."""
    answer: str = ""
    """Stands before the text of the answer, behind reasoning or without it."""
    remark: str = ""
    """Stands, where there is an ``answer``, before text that goes before it and ends like reasoning."""
    hints: tuple[str, ...] = ()
    """A chat template that has all of these is of this format."""

    def matches(self, template: str) -> bool:
        return all(hint in template for hint in self.hints)

    def opened_by(self, prompt: str) -> bool:
        """Whether a prompt ends inside of a block: with a marker that begins one, at most space after it."""
        return prompt.rstrip().endswith(tuple(marker.rstrip() for marker in self.begins))


# In the order in which a template is asked; the most special first.
REASONING_FORMATS = {
    row.name: row
    for row in (
        ReasoningFormat(
            "harmony",
            ("<|channel|>analysis<|message|>",),
            ("<|end|>",),
            dropped=(
                "<|start|>assistant",
                "<|channel|>final<|message|>",
                "<|channel|>commentary<|message|>",
                "<|return|>",
            ),
            between="<|start|>assistant",
            answer="<|channel|>final<|message|>",
            remark="<|channel|>commentary<|message|>",
            hints=("<|channel|>analysis<|message|>",),
        ),
        ReasoningFormat("mistral", ("[THINK]",), ("[/THINK]",), hints=("[THINK]",)),
        ReasoningFormat(
            "cohere",
            ("<|START_THINKING|>",),
            ("<|END_THINKING|>",),
            dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
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
            dropped=("[END FINAL RESPONSE]",),
            hints=("[BEGIN FINAL RESPONSE]",),
        ),
        ReasoningFormat(
            "granite",
            ("<think>",),
            ("</think>",),
            dropped=("<response>", "</response>"),
            hints=("<think></think>", "<response></response>"),
        ),
        ReasoningFormat("think", ("<think>",), ("</think>",), hints=("</think>",)),
    )
}


def prompt_opens_reasoning(prompt: str) -> bool:
    """Whether a rendered prompt leaves the model inside a block of reasoning, in any format that is known.

    >>> prompt_opens_reasoning("<|im_start|>assistant\\n<think>\\n")
    True
    >>> prompt_opens_reasoning("What is <think>?<|im_end|>\\n<|im_start|>assistant\\n")
    False
    """
    return any(row.opened_by(prompt) for row in REASONING_FORMATS.values())
