"""The speech page of the playground, run by Node with a fake page, server and audio device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.node import needs_node, run_node

from penstock.media.audio_files import pcm_bytes, wav_header
from penstock.serve.playground.assets import assets

FAKE_PAGE = Path(__file__).parent / "fake_page.js"
SAMPLES = np.array([0.0, 0.5, -0.5, 1.0, 0.25], np.float32)
WAV = list(wav_header(800, None) + pcm_bytes(SAMPLES))
CODE = f"""
import {{ byId }} from "./fake_page.js";
import {{ WavDecoder, SpeechView, peaks }} from "./speech.js";
const wav = {WAV};
const played = [];
globalThis.AudioContext = class {{
  currentTime = 0;
  state = "running";
  createBuffer(channels, length, rate) {{
    return {{ length, rate, copyToChannel: (samples) => played.push([...samples]) }};
  }}
  createBufferSource() {{ return {{ connect() {{}}, start: (at) => played.push(at) }}; }}
  close() {{ this.state = "closed"; }}
}};
globalThis.getComputedStyle = () => ({{ color: "black" }});
const bars = [];
byId("speech-wave").getContext = () => ({{ clearRect() {{}}, fillRect: (...box) => bars.push(box) }});
Object.assign(byId("speech-wave"), {{ width: 720, height: 96 }});
const requests = [];
globalThis.fetch = async (url, options) => {{
  requests.push([url, options.body ? JSON.parse(options.body) : null]);
  if (url.endsWith("voices")) return new Response(JSON.stringify({{ voices: ["anna"] }}));
  if (byId("speech-text").value === "bad") {{
    return new Response(JSON.stringify({{ error: {{ message: "no voice" }} }}), {{ status: 400 }});
  }}
  const parts = [wav.slice(0, 20), wav.slice(20, 47), wav.slice(47)];
  const stream = new ReadableStream({{
    start(controller) {{
      for (const part of parts) controller.enqueue(Uint8Array.from(part));
      controller.close();
    }},
  }});
  return new Response(stream);
}};
const results = [];
for (const size of [1, 3, 44, 45, 100]) {{
  const decoder = new WavDecoder();
  const decoded = [];
  for (let i = 0; i < wav.length; i += size) {{
    decoded.push(...decoder.add(Uint8Array.from(wav.slice(i, i + size))));
  }}
  results.push([decoder.sampleRate, decoded]);
}}
const errors = [];
const view = new SpeechView({{ onerror: (error) => errors.push(error.status) }});
await view.load();
byId("model").value = "tiny";
byId("speech-text").value = "Hello.";
byId("speech-voice").value = "anna";
await view.speak();
const note = byId("speech-note").textContent;
byId("speech-text").value = "bad";
await view.speak();
console.log(JSON.stringify({{
  results, played, requests, note, errors, bars: bars.length,
  error: byId("speech-error").textContent,
  voices: byId("speech-voice").children.map((option) => option.value),
  peaks: peaks([[0, 0.5], [-0.75, 0.1]], 2),
}}));
"""


@needs_node
def test_the_page_plays_and_draws_speech_and_shows_errors(tmp_path: Path) -> None:
    result: dict[str, Any] = run_node(tmp_path, CODE, FAKE_PAGE)
    expected = np.frombuffer(pcm_bytes(SAMPLES), "<i2") / 32768
    for rate, samples in result["results"]:
        assert rate == 800
        np.testing.assert_allclose(samples, expected, atol=1e-6)
    buffers = [entry for entry in result["played"] if isinstance(entry, list)]
    np.testing.assert_allclose(np.concatenate(buffers), expected, atol=1e-6)
    start_times = [entry for entry in result["played"] if not isinstance(entry, list)]
    assert start_times == [0, pytest.approx(len(buffers[0]) / 800)], (
        "the second buffer starts at the end of the first"
    )
    route, body = result["requests"][1]
    assert route == "http://host/prefix/v1/audio/speech"
    assert body == {"model": "tiny", "input": "Hello.", "voice": "anna", "response_format": "wav"}
    assert result["voices"] == ["default", "anna"]
    assert result["note"].startswith("First audio after 0.")
    assert result["bars"] == 2 * 240
    assert (result["errors"], result["error"]) == ([400], "no voice")
    assert result["peaks"] == [0.5, 0.75]


def test_the_speech_module_is_served() -> None:
    assert "/playground/speech.js" in assets()
