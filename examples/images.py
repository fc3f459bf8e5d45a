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
    """Return a content part with an image file, as a data URL."""
    media_type = mimetypes.guess_type(path.name)[0] or "image/png"
    data = base64.b64encode(path.read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:{media_type};base64,{data}"}}


def main() -> None:
    """Ask a question about images and stream the answer."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("images", nargs="+", type=Path, help="image files")
    parser.add_argument("question")
    options = parser.parse_args()
    parts = [image_part(image) for image in options.images]
    content: Any = [*parts, {"type": "text", "text": options.question}]
    with OpenAI(base_url=f"{options.url}/v1", api_key="none") as client:
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
                print(f"\n{chunk.usage.prompt_tokens} prompt tokens, including the images")


if __name__ == "__main__":
    main()
