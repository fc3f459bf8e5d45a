"""Errors in forked processes whose first step would hang, because torch's threads are missing."""

from __future__ import annotations

import pickle
import subprocess
import sys
import textwrap

from penstock.errors import ForkedProcessError

SCRIPT = """
    import os, sys
    from penstock import LLM, SamplingParams
    from penstock.errors import ForkedProcessError

    def load():
        return LLM("demo", num_threads=2, quantization_encoding="int8")

    def generate_text(llm):
        return llm.generate("Once upon a time", SamplingParams(max_new_tokens=4), use_tqdm=False)[0].text

    def run_in_child(action):
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            try:
                print("child:", action(), flush=True)
            except ForkedProcessError as error:
                assert error.origin == os.getppid() and error.process == os.getpid()
                print("refused", flush=True)
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
"""


def run_script(code: str) -> list[str]:
    """Run SCRIPT with additional code, for at most 120 s. Return the lines that it prints."""
    script = textwrap.dedent(SCRIPT) + textwrap.dedent(code)
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_steps_and_loads_are_refused_in_a_fork_of_a_process_that_has_generated() -> None:
    lines = run_script(
        """
        from penstock.pipelines.core import TokenGeneratorRequest

        llm = load()
        text_before = generate_text(llm)
        request = TokenGeneratorRequest("a", 0, "demo", prompt="Once")
        context = llm.tokenizer.build_context(request)
        run_in_child(lambda: generate_text(llm))
        run_in_child(lambda: next(llm.stream("Once")))
        run_in_child(lambda: llm.beam_search("Once", num_beams=2, max_new_tokens=2))
        run_in_child(lambda: generate_text(load()))
        run_in_child(lambda: llm.pipeline.ready(context))
        run_in_child(lambda: llm.pipeline.prepare_next())
        run_in_child(lambda: llm.pipeline.model.pack_pending())
        run_in_child(lambda: llm.pipeline.next_token({"a": context}))
        stream = llm.stream("Once upon a time", SamplingParams(max_new_tokens=8))
        next(stream)
        run_in_child(lambda: generate_text(llm))
        list(stream)
        print(generate_text(llm) == text_before)
        """
    )
    assert lines == ["refused"] * 9 + ["True"]


def test_a_fork_can_load_a_model_if_its_parent_has_loaded_none() -> None:
    lines = run_script(
        """
        run_in_child(lambda: len(generate_text(load())) > 0)
        print(len(generate_text(load())) > 0)
        """
    )
    assert lines == ["child: True", "True"]


def test_the_error_names_the_solution_and_can_be_pickled() -> None:
    error = pickle.loads(pickle.dumps(ForkedProcessError(12, 34)))
    assert (error.origin, error.process) == (12, 34)
    assert isinstance(error, RuntimeError)
    assert "process 34 was forked from process 12" in str(error)
    assert "'spawn'" in str(error)
