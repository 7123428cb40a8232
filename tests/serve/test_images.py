"""Images in the messages of clients: the answers are those of `LLM.generate`, nothing is fetched, no file is read."""

import base64
import io
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

import eyas
from eyas.serve import images
from media_models import with_processor
from serving import Running, running

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
ASK = {"type": "text", "text": "What is this?"}
CHATS = "/v1/chat/completions"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> eyas.LLM:
    return eyas.load(with_processor(tmp_path_factory.mktemp("model") / "llava"), "suffix")


@pytest.fixture(scope="module")
def server(llm: eyas.LLM) -> Iterator[Running]:
    with running(llm, rows=3) as one:
        yield one


def picture(seed: int) -> Image.Image:
    return Image.frombytes("RGB", (20, 12), bytes((seed * 50 + i * (seed + 1)) % 256 for i in range(720)))


def data_url(image: Image.Image, form: str = "PNG") -> str:
    buffer = io.BytesIO()
    image.save(buffer, form)
    return f"data:image/{form.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def chat_of(image: Any) -> list[dict[str, Any]]:
    """Messages with an image, in the form of `LLM.generate`."""
    return [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "image", "image": image}, ASK]},
    ]


def asked(url: Any) -> list[dict[str, Any]]:
    """The same in OpenAI's form; the system message is a string, as clients write it."""
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "image_url", "image_url": url}, ASK]},
    ]


@pytest.mark.slow
def test_chats_with_images(server: Running, llm: eyas.LLM) -> None:
    """Guards images against each other, in both forms of a URL, whole and streamed; a text after
    them; and the counts of tokens."""
    expected = []
    for seed in range(3):
        result = llm.generate(chat_of(picture(seed)), max_new_tokens=12, ignore_eos=True)
        url: Any = data_url(picture(seed)) if seed else {"url": data_url(picture(seed)), "detail": "low"}
        made = server.post(CHATS, {"messages": asked(url), **GREEDY}).json()
        assert made["choices"][0]["message"]["content"] == result.text
        assert made["usage"]["prompt_tokens"] == len(llm.request(chat_of(picture(seed)))[0].prompt)
        stream = server.client().chat.completions.create(
            model=None, messages=asked(url), stream=True, temperature=0, max_tokens=12
        )  # type: ignore[call-overload]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) in result.text
        expected.append(result.text)
    assert len(set(expected)) == 3, "the images make a difference"
    text = server.post(CHATS, {"messages": [{"role": "user", "content": [ASK]}], **GREEDY}).json()
    question = [{"role": "user", "content": [ASK]}]
    assert text["choices"][0]["message"]["content"] == llm.generate(question, max_new_tokens=12, ignore_eos=True).text


def test_other_endpoints(server: Running, llm: eyas.LLM) -> None:
    """Guards /v1/responses and /tokenize."""
    parts = [{"type": "input_image", "image_url": data_url(picture(2))}, {"type": "input_text", "text": ASK["text"]}]
    body = {"input": [{"role": "user", "content": parts}], "instructions": "Be brief.", "temperature": 0}
    made = server.post("/v1/responses", {**body, "max_output_tokens": 12, "ignore_eos": True}).json()
    own = llm.generate(chat_of(picture(2)), max_new_tokens=12, ignore_eos=True)
    assert made["output"][0]["content"][0]["text"] == own.text
    counted = server.post("/tokenize", {"messages": asked(data_url(picture(2)))}).json()
    assert tuple(counted["tokens"]) == llm.request(chat_of(picture(2)))[0].prompt


BROKEN = base64.b64encode(base64.b64decode(data_url(picture(0)).partition(",")[2])[:60]).decode()


def url_of(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": url}


@pytest.mark.quick("part7-send PNG, JPEG, WEBP, GIF")
@pytest.mark.parametrize(
    ("part", "words"),
    [
        (url_of("https://example.com/cat.png"), "fetches no images"),
        (url_of({"url": "file:///etc/hostname"}), "fetches no images"),
        (url_of("data:image/png,abc"), "fetches no images"),
        (url_of("data:image/png;base64,%%%"), "not base64"),
        (url_of("data:image/png;base64,aGVsbG8="), "not an image that can be read"),
        (url_of(f"data:image/png;base64,{BROKEN}"), "broken"),
        (url_of({}), "has no image"),
        (url_of(data_url(picture(0), "BMP")), "send PNG, JPEG, WEBP, GIF"),
        (url_of(data_url(Image.new("RGB", (1, 51)))), "at most 50 times as long as wide"),
        ({"type": "image", "path": __file__}, "of type 'image'"),
        ({"type": "video", "url": "https://example.com/cat.mp4"}, "of type 'video'"),
        ({"type": "input_audio", "input_audio": {}}, "of type 'input_audio'"),
    ],
)
def test_what_is_refused(server: Running, part: dict[str, Any], words: str) -> None:
    """Each gets one line and the status 400, alone and beside an image."""
    for parts in ([part, ASK], [part, url_of(data_url(picture(0))), ASK]):
        message = refusal(server, parts)
        assert words in message or (len(parts) == 2 and "only parts of text are read here" in message)
        assert "\n" not in message
        assert "root" not in message


def refusal(server: Running, parts: list[Any]) -> str:
    """Return why a user's message with these parts is refused."""
    response = server.post(CHATS, {"messages": [{"role": "user", "content": parts}], **GREEDY})
    assert response.status_code == 400, response.text
    return str(response.json()["error"]["message"])


@pytest.mark.slow
def test_variables_cannot_name_files(server: Running) -> None:
    """Guards the processor, which takes what the chat template does not know: `images` would be paths."""
    wrong = {"images": [__file__], "chat_template": "{{ 1 }}", "tokenize": False, "size": 10**9, "do_resize": False}
    for name, value, status in (*((*item, 400) for item in wrong.items()), ("enable_thinking", False, 200)):
        body = {"messages": asked(data_url(picture(0))), "chat_template_kwargs": {name: value}, **GREEDY}
        response = server.post(CHATS, body)
        assert response.status_code == status
        assert status == 200 or name in response.json()["error"]["message"]


def test_many_pixels(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards memory: the pixels of all images count, before they are unpacked, and so does their number: a processor
    makes each tiny image as large as any other."""
    one = url_of(data_url(picture(0)))
    assert "send fewer" in refusal(server, [*[one] * (images.MOST_IMAGES + 1), ASK])
    monkeypatch.setattr(images, "MOST_PIXELS", 2 * 240 - 1)
    assert "send smaller ones" in refusal(server, [one, one, ASK])
    made = server.post(CHATS, {"messages": [{"role": "user", "content": [one, ASK]}], **GREEDY})
    assert made.status_code == 200


def test_a_prompt_that_the_model_refuses(server: Running) -> None:
    """Guards the other requests from one whose text holds a placeholder without its image."""
    refusal(server, [url_of(data_url(picture(0))), {"type": "text", "text": "Is <image> an image?"}])
    assert server.post(CHATS, {"messages": asked(data_url(picture(0))), **GREEDY}).status_code == 200
