"""Images in a chat with the OpenAI client.

penstock serve --model demo-vision &
python examples/images.py --url http://127.0.0.1:8000 examples/shapes.png "What is in the picture?"
"""

from __future__ import annotations

import argparse
import base64
import mimetypes
from pathlib import Path
from typing import Any

from openai import OpenAI


def image_part(path: Path) -> dict[str, Any]:
    """Return the part of a message with an image file."""
    kind = mimetypes.guess_type(path.name)[0] or "image/png"
    data = base64.b64encode(path.read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("images", nargs="+", type=Path, help="image files, then the question")
    given = parser.parse_args()
    *files, question = map(str, given.images)
    content: Any = [*(image_part(Path(file)) for file in files), {"type": "text", "text": question}]
    with OpenAI(base_url=f"{given.url}/v1", api_key="none") as client:
        model = client.models.list().data[0].id
        stream = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": content}],
            stream=True,
            stream_options={"include_usage": True},
        )
        for chunk in stream:
            if chunk.choices:
                print(chunk.choices[0].delta.content or "", end="", flush=True)
            elif chunk.usage is not None:
                print(f"\n{chunk.usage.prompt_tokens} tokens of the prompt, those of the images included")


if __name__ == "__main__":
    main()
