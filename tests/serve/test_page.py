"""The page in a real browser: it shows what a scripted server sends."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import eyas
from serving import PROMPTS, Running

pytest.importorskip("fastapi", reason="the server needs eyas[serve]")

from eyas.serve import page as page_files
from scripted_server import MODEL, Script, application, chunk, cycle, node, prefill, running

pytestmark = pytest.mark.slow

EVIL = "<img src=x onerror='window.hacked=1'></script><script>window.hacked=1</script>"
FIRST = prefill("What")
SECOND = cycle(1, "What", [" time", " do"], " you", refused=[" we", " they"])
THIRD = cycle(2, " you", [" want"], "?", plan="8/3/2")
STATS = {
    "rows": 4, "running": 3, "waiting": 2,
    "recent": {
        "tokens_per_second": 1234.5, "cycles": 10, "tau": 3.21, "mean_cycle_ms": 6.5,
        "accepted_by_depth": [0.75, 0.5, 0.25], "decisions": {"16/5/4": 6, "plain": 3, "suffix": 1},
    },
}  # fmt: skip
Open = Callable[..., Any]


@pytest.fixture
def script() -> Script:
    return Script(turns=[[FIRST, SECOND, THIRD]], stats=STATS)


@pytest.fixture
def address(script: Script) -> Iterator[str]:
    with running(application(script)) as url:
        yield url


def ask(page: Any, text: str = "Hello") -> None:
    """Send a message and wait for the end of its answer."""
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")
    page.locator("#send:visible").wait_for()


def fill(page: Any, settings: dict[str, str]) -> None:
    """Open the settings and fill these in."""
    page.get_by_text("Settings").click()
    for label, value in settings.items():
        page.get_by_label(label).fill(value)


def heading(page: Any) -> str:
    """The words above the selected cycle."""
    return str(page.get_by_label("The selected cycle").get_by_role("heading").text_content())


def fits(page: Any) -> bool:
    """Whether nothing sticks out to the right."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


def test_turns_of_a_chat(open_page: Open, address: str, script: Script) -> None:
    """A second turn that forgets the first, or a control that is not sent, is noticed by nobody who
    looks at one answer."""
    page = open_page(address)
    fill(page, {"System prompt": "Be brief.", "Temperature": "0.5", "Top k": "40", "Seed": "7", "Max tokens": "12"})
    page.get_by_label("Drafting").select_option("suffix")
    ask(page, "Hello")
    ask(page, "And then?")
    answer = page.locator(".answer").first
    assert answer.text_content() == "What time do you want?"
    kinds = answer.locator(".token").evaluate_all("spans => spans.map(s => s.textContent + ':' + s.classList[1])")
    assert kinds == ["What:prompt", " time:drafted", " do:drafted", " you:own", " want:drafted", "?:own"]
    assert page.locator(".figures").first.text_content().startswith("6 tokens \u00b7 2 cycles \u00b7 tau 2.50")
    first, second = script.bodies
    settings = {"temperature": 0.5, "top_k": 40, "seed": 7, "max_tokens": 12, "drafting": "suffix", "model": MODEL}
    assert settings.items() <= second.items()
    assert "top_p" not in second, "an empty field is the server's business"
    assert (first["stream"], first["cycles"]) == (True, True)
    assert [m["role"] for m in second["messages"]] == ["system", "user", "assistant", "user"]
    assert second["messages"][2]["content"] == "What time do you want?"


def test_settings_are_kept_and_the_key_is_not(open_page: Open, address: str, script: Script) -> None:
    """A key in the store of the browser would outlive the visit. An impossible setting is not sent."""
    page = open_page(address)
    fill(page, {"Temperature": "0.7", "System prompt": "Be brief.", "API key": "secret"})
    page.get_by_label("API key").press("Tab")
    page.get_by_label("Answers").select_option("as written")
    assert "secret" not in page.evaluate("JSON.stringify(localStorage)")
    page.reload()
    kept = [page.get_by_label(label).input_value() for label in ("System prompt", "Answers", "Temperature")]
    assert kept == ["Be brief.", "text", "0.7"]
    fill(page, {"Temperature": "-1"})
    page.get_by_label("Message").fill("Hello")
    page.get_by_role("button", name="Send").click()
    assert page.evaluate("document.activeElement.name") == "temperature"
    assert script.bodies == []


def begin_without_end(page: Any, script: Script) -> None:
    """Ask for an answer that does not end, and wait until it has begun."""
    script.endless = True
    page.get_by_label("Message").fill("Count")
    page.keyboard.press("Enter")
    page.get_by_text("word word").wait_for()


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stop(open_page: Open, address: str, script: Script, how: str) -> None:
    """Stopping must reach the server, or it goes on decoding for nobody; the text so far stays, and
    the chat goes on."""
    page = open_page(address)
    begin_without_end(page, script)
    if how == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    page.locator(".figures").get_by_text("stopped").wait_for()
    assert script.hung_up.wait(600)
    assert page.locator(".answer").text_content().startswith("What time do you want? word")
    script.endless = False
    ask(page, "Go on")
    assert len(script.bodies[-1]["messages"]) == 3


def manage(page: Any, name: str) -> None:
    """Choose from the menu over the conversation, and say yes if it asks."""
    page.once("dialog", lambda dialog: dialog.accept())
    page.get_by_text("More", exact=True).click()
    page.get_by_role("button", name=name).click()


def contents(script: Script) -> list[str]:
    """The messages of the last request."""
    return [message["content"] for message in script.bodies[-1]["messages"]]


def test_deleting_stops_the_answer(open_page: Open, address: str, script: Script) -> None:
    """Late chunks of the old conversation must not enter the new one, and its end must not bring it back."""
    page = open_page(address)
    begin_without_end(page, script)
    manage(page, "Delete this conversation")
    assert script.hung_up.wait(600)
    script.endless = False
    page.locator("#send:visible").wait_for()
    ask(page, "Hello")
    assert contents(script) == ["Hello"]
    assert page.locator(".turn").count() == 2
    assert page.locator("#talks option").all_text_contents() == ["Hello"]


@pytest.mark.exhaustive
def test_deleting_asks_first(open_page: Open, address: str) -> None:
    """A slip of the hand must not cost a conversation: what deletes asks, and is not beside what sends."""
    page = open_page(address)
    ask(page)
    asked: list[str] = []
    page.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.dismiss()))
    for name in ("Delete this conversation", "Delete all conversations"):
        page.get_by_text("More", exact=True).click()
        page.get_by_role("button", name=name).click()
    whole = "Delete all conversations that this browser keeps"
    assert [message.split("?")[0] for message in asked] == ["Delete this conversation", whole]
    assert page.locator(".turn").count() == 2
    assert page.locator("#composer button:visible").all_text_contents() == ["Send"]


def test_copy(open_page: Open, address: str) -> None:
    """The copy is what the model wrote, without the page's own words and without Markdown's effects."""
    page = open_page(address, permissions=["clipboard-read", "clipboard-write"])
    ask(page)
    for turn, text in ((page.locator(".turn").last, "What time do you want?"), (page.locator(".user"), "Hello")):
        turn.get_by_role("button", name="Copy").click()
        turn.get_by_text("Copied").wait_for()
        assert page.evaluate("navigator.clipboard.readText()") == text


def test_regenerate(open_page: Open, address: str, script: Script) -> None:
    """The question is asked again without the answer that it had; if that fails, the old answer is not lost."""
    script.turns = [[prefill("one")], [prefill("two")]]
    page = open_page(address)
    ask(page)
    script.refusal = 429, "too many"
    page.get_by_role("button", name="Regenerate").click()
    page.get_by_text("too many").wait_for()
    assert page.locator(".answer").first.text_content() == "one"
    script.refusal = None
    page.get_by_role("button", name="Regenerate").click()
    page.get_by_text("two", exact=True).wait_for()
    page.locator("#send:visible").wait_for()
    assert contents(script) == ["Hello"]
    assert page.locator(".answer").all_text_contents() == ["two"]
    ask(page, "On")
    assert contents(script) == ["Hello", "two", "On"]
    assert page.get_by_role("button", name="Regenerate").count() == 1, "only the last answer can be replaced"


def test_edit(open_page: Open, address: str, script: Script) -> None:
    """An edited question replaces its answer; what came later stays, in the conversation that it belongs to."""
    page = open_page(address)
    ask(page, "First")
    ask(page, "Second")
    edit = page.locator(".user").first.get_by_role("button", name="Edit")
    edit.click()
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.textContent") == "Edit", "the focus is where it was"
    edit.press("Enter")
    page.get_by_label("Edited message").fill("Other")
    page.keyboard.press("Enter")
    page.locator("#send:visible").wait_for()
    assert contents(script) == ["Other"]
    assert page.locator(".user .text").all_text_contents() == ["Other"]
    assert page.locator("#talks option").all_text_contents() == ["Other", "First"]
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edited message").fill("Again")
    page.keyboard.press("Enter")
    page.locator("#send:visible").wait_for()
    assert page.locator("#talks option").all_text_contents() == ["Again", "First"]
    page.get_by_label("Conversations").select_option("First")
    assert page.locator(".user .text").all_text_contents() == ["First", "Second"]


def test_conversations_are_kept(open_page: Open, address: str, script: Script) -> None:
    """A conversation outlives a reload, and goes on with all its turns; a tab shows the one that it had."""
    page = open_page(address)
    ask(page, "First <b>")
    page.get_by_role("button", name="New").click()
    ask(page, "Second")
    page.reload()
    assert page.locator(".user .text").all_text_contents() == ["Second"]
    page.get_by_label("Conversations").select_option("First <b>")
    assert page.locator(".answer").text_content() == "What time do you want?"
    assert page.locator(".figures").text_content().startswith("6 tokens")
    ask(page, "On")
    assert contents(script) == ["First <b>", "What time do you want?", "On"]
    manage(page, "Delete all conversations")
    assert page.locator(".turn").count() == 0
    assert page.evaluate("Object.keys(localStorage).filter(name => name.startsWith('eyas.talk'))") == []


def test_question_without_an_answer_is_not_lost(open_page: Open, address: str, script: Script) -> None:
    """Leaving the page before the first token comes must not leave a question without an answer in the
    conversation: many templates refuse two questions in a row."""
    script.endless, script.turns = True, [[]]
    page = open_page(address)
    page.route("**/v1/chat/completions", lambda route: None)  # no answer ever
    page.get_by_label("Message").fill("Hello")
    page.keyboard.press("Enter")
    page.locator("#stop:visible").wait_for()
    page.reload()
    assert page.get_by_label("Message").input_value() == "Hello"
    assert page.locator(".turn").count() == 0


@pytest.mark.exhaustive
def test_store_of_conversations_is_bounded(open_page: Open, address: str) -> None:
    """The oldest conversations go, never the one that is written, and what is damaged counts as nothing."""
    page = open_page(address)
    kept = page.evaluate(
        """async () => {
            const { Talks, newTalk } = await import("./page/talks.js");
            localStorage.setItem("eyas.talk.broken", "{");
            localStorage.setItem("eyas.talk.odd", '{"messages": [{"role": "user"}]}');
            const talk = (name, content) => ({ ...newTalk([{ role: "user", content }]), id: name });
            const names = () => new Talks().list().map(({ id }) => id).sort();
            const talks = new Talks();
            for (let n = 0; n < 60; n++) talks.save({ ...talk(`n${n}`, "x") });
            const many = names();
            for (let n = 0; n < 4; n++) talks.save(talk(`big${n}`, "x".repeat(900_000)));
            const big = names();
            const huge = talks.save(talk("huge", "x".repeat(3_000_000)));
            return [many.length, big, huge, names()];
        }"""
    )
    many, big, huge, after = kept
    assert many == 50
    assert {"big2", "big3"} <= set(big)
    assert not {"big0", "big1"} & set(big)
    assert huge is False, "too large to be kept: the page says so, and nothing else goes for it"
    assert after == big


@pytest.mark.exhaustive
def test_files_of_a_conversation(open_page: Open, address: str) -> None:
    """What is saved is the conversation: the prompt that was in force, the turns, nothing of the page."""
    page = open_page(address)
    fill(page, {"System prompt": "Be brief."})
    ask(page, "Hello/you")
    saved = {}
    for name in ("Markdown", "JSON"):
        with page.expect_download() as download:
            manage(page, f"Save as {name}")
        saved[download.value.suggested_filename] = Path(download.value.path()).read_text(encoding="utf-8")
    answer = "What time do you want?"
    written = f"# Hello/you\n\n## System\n\nBe brief.\n\n## You\n\nHello/you\n\n## {MODEL}\n\n{answer}\n"
    assert saved["Hello_you.md"] == written
    turns = json.loads(saved["Hello_you.json"])["messages"]
    assert [turn["content"] for turn in turns] == ["Be brief.", "Hello/you", answer]


MARKDOWN = """# A title

Some *em*, **bold *both***, `a * b`, 2 * 3 * 4, snake_case_name, \\*not\\*, <b>text</b>.
- one
- two
  1. inner

     after a line
- [good](https://example.org/a_(b)) and [bad](javascript:alert(1))

1. first
```python
print("*a*")  # <b>
```
2. second

> a quote
> > in a quote

| a | b |
|---|--:|
| 1 | `x` |

---
1986. A year"""


def answer_of(page: Any, script: Script, text: str) -> Any:
    """An answer of that text, a token for each three letters."""
    starts = range(0, len(text), 6)
    script.turns = [[cycle(n, "x", [text[at : at + 3]], text[at + 3 : at + 6]) for n, at in enumerate(starts, 1)]]
    ask(page)
    return page.locator(".answer").last


def test_markdown(open_page: Open, address: str, script: Script) -> None:
    """What models write is shown as they mean it, whatever way its tokens cut it, and its tokens stay what they are."""
    page = open_page(address)
    answer = answer_of(page, script, MARKDOWN)
    shown = {
        "h3": ["A title"],
        "em": ["em", "both"],
        "strong": ["bold both"],
        ":not(pre) > code": ["a * b", "x"],
        "ul > li": ["one", "twoinnerafter a line", "good and [bad](javascript:alert(1))"],
        "ul ol > li > p": ["inner", "after a line"],
        "pre": ['print("*a*")  # <b>\n'],
        "figcaption span": ["python"],
        "blockquote blockquote": ["in a quote"],
        "td": ["1", "x"],
    }
    for selector, texts in shown.items():
        assert answer.locator(selector).all_text_contents() == texts, selector
    assert "2 * 3 * 4, snake_case_name, *not*, <b>text</b>." in answer.text_content()
    assert answer.locator("> ol").evaluate_all("lists => lists.map(list => list.start)") == [1, 2]
    assert answer.locator("> p").last.text_content() == "1986. A year"
    links = answer.locator("a").evaluate_all("links => links.map(link => [link.href, link.rel])")
    assert links == [["https://example.org/a_(b)", "noopener noreferrer"]]
    assert answer.locator("b, img, hr").evaluate_all("all => all.map(one => one.tagName)") == ["HR"]
    answer.locator("pre .token").first.click()
    assert heading(page).startswith("Cycle")
    page.get_by_text("Settings").click()
    page.get_by_label("Answers").select_option("as written")
    assert answer.text_content() == MARKDOWN
    assert answer.locator(".selected").count() > 0, "the cycle is still marked"


@pytest.mark.exhaustive
def test_markdown_that_comes_in_parts(open_page: Open, address: str) -> None:
    """Only the last blocks are drawn anew when text comes: the result is that of the whole text."""
    page = open_page(address)
    parts, whole = page.evaluate(
        """async (text) => {
            const { Answer } = await import("./page/answer.js");
            const { markdown } = await import("./page/markdown.js");
            const drawn = (pieces) => {
                const answer = new Answer(() => {}, markdown);
                for (const piece of pieces) { answer.add(piece, null); answer.draw(); }
                answer.end();
                answer.element.normalize();
                return answer.element.outerHTML;
            };
            return [drawn([...text]), drawn([text])];
        }""",
        MARKDOWN,
    )
    assert parts == whole


def test_text_that_repeats_itself(open_page: Open, address: str, script: Script) -> None:
    """A small model repeats one mark for ever: nothing of it may be lost, nor take the page with it."""
    texts = [part * 2000 for part in ("**a ", "*a *b", "`a", "[a](", ">", "- ", "_a ", "|-", "https://", "a\n", "<b>")]
    page = open_page(address)
    page.get_by_text("Settings").click()
    for text in texts:
        script.turns = [[chunk(text, None)]]
        ask(page)
    page.get_by_label("Answers").select_option("as written")
    assert page.locator(".answer").all_text_contents() == texts


def test_key_is_asked_for(open_page: Open, address: str, script: Script) -> None:
    """Without a key the reader is led to its field, and the question is not lost."""
    script.key = "secret"
    page = open_page(address)
    ask(page, "Hello")
    assert "a key is needed" in page.get_by_role("alert").text_content()
    assert page.evaluate("document.activeElement.name") == "key"
    page.keyboard.type("secret")
    page.get_by_label("Message").focus()
    assert page.get_by_label("Message").input_value() == "Hello"
    page.keyboard.press("Enter")
    page.get_by_text("What time do you want?").wait_for()
    assert len(script.bodies[-1]["messages"]) == 1, "the refused question is not sent twice"


@pytest.mark.parametrize("late", [False, True])
def test_errors_are_shown(open_page: Open, address: str, script: Script, late: bool) -> None:
    """An error in the middle of a stream comes with status 200; a full queue with 429."""
    if late:
        script.turns = [[FIRST, {"error": {"message": "the row has failed", "code": 500}}]]
    else:
        script.refusal = 429, "the row has failed"
    page = open_page(address)
    ask(page)
    assert page.locator("#log").get_by_role("alert").text_content() == "the row has failed"
    assert page.locator(".answer").text_content() == ("What" if late else "")


@pytest.mark.exhaustive
def test_text_that_comes_late_or_early(open_page: Open, address: str, script: Script) -> None:
    """A server holds back what may become a stop string, and sends the first cycle's text with the
    prompt's token: every part must still belong to its own cycle. A text that the server changed,
    or sends without a cycle, is not lost."""
    script.turns = [
        [FIRST, chunk(" ti", SECOND), chunk("me do you want", THIRD), chunk("!", None)],
        [chunk("What time do you want", FIRST), chunk("", SECOND), chunk("? Yes", THIRD)],
        [FIRST, chunk("\u2026", SECOND), chunk(" want?", THIRD)],
        [chunk("No cycles", None)],
    ]
    page = open_page(address)
    for _ in script.turns:
        ask(page)
    listed = "all => all.map(a => [...a.querySelectorAll('.token')].map(s => s.textContent + s.dataset.cycle))"
    late, early, changed, without = page.locator(".answer").evaluate_all(listed)
    assert late == ["What0", " ti1", "me1", " do1", " you1", " want2", "!2"]
    assert early == ["What0", " time1", " do1", " you1", " want2", "?2"]
    assert changed == ["What0", "\u20261", " want2", "?2"]
    assert without == []
    assert page.locator(".answer").all_text_contents()[1::2] == ["What time do you want? Yes", "No cycles"]


def test_token_shows_its_cycle(open_page: Open, address: str) -> None:
    """The tree with its texts, q and p; the accepted path; the reason; time, plan and tau: what the page is for."""
    page = open_page(address, reduced_motion="reduce")
    ask(page)
    panel = page.get_by_label("The selected cycle")
    assert "Every cycle, token by token" in panel.inner_text()
    page.locator(".answer .token").nth(2).click()
    assert panel.get_by_role("heading").text_content() == "Cycle 1 of 2"
    tree = panel.locator("svg.tree")
    assert tree.locator("g.accepted .token").all_text_contents() == ["\u00b7time", "\u00b7do"]
    assert tree.locator("g.accepted .numbers").all_text_contents() == ["q.90 p.80"] * 2
    assert tree.locator("g.refused .token").all_text_contents() == ["\u00b7we", "\u00b7they"]
    assert tree.locator("g.own .token").all_text_contents() == ["\u00b7you"]
    assert tree.locator("path.accepted").count() == 2
    assert panel.locator(".reason").text_content() == (
        "After \u00b7do the draft offered \u00b7we and \u00b7they. The target drew \u00b7you, which is none of them."
    )
    facts = panel.locator(".facts").inner_text()
    for fact in ("12.3 ms", "4 nodes", "16/5/4", "2 drafted + 1 own", "2.50"):
        assert fact in facts
    assert page.locator(".answer .selected").all_text_contents() == [" time", " do", " you"]
    panel.get_by_text("All nodes as a table").click()
    panel.locator("tbody tr").nth(3).wait_for()
    assert panel.locator("tbody tr").count() == 4


def test_why_a_path_ended(open_page: Open, address: str, script: Script) -> None:
    """Each end has its own sentence; a cycle without a draft has no tree: no legend and no frame around nothing."""
    plain = cycle(1, "What", [], " is", plan="plain")
    stop, length = ({**cycle(n, "a", [" b"], " c"), "ended": ended} for n, ended in ((3, "stop"), (4, "length")))
    script.turns = [[FIRST, plain, cycle(2, " is", [" it"], "?"), stop, length]]
    page = open_page(address)
    ask(page)
    for at, words in enumerate(
        ("The target read the prompt", "Nothing was drafted", "The path reached a leaf", "an end token or a stop string",
         "as many tokens as")
    ):  # fmt: skip
        page.locator(f".answer [data-cycle='{at}']").first.click()
        assert words in page.locator(".reason").text_content()
        hidden = [page.locator(part).is_hidden() for part in (".legend", ".drawing")]
        assert at < 1 or hidden == [at == 1] * 2


def test_keyboard_alone(open_page: Open, address: str) -> None:
    """Everything that a click does is done by keys, and the focus is never lost."""
    page = open_page(address, reduced_motion="reduce")
    page.keyboard.type("Hello")  # the message has the focus at first
    page.keyboard.press("Enter")
    page.locator("#send:visible").wait_for()
    for _ in ("settings", "regenerate", "copy", "answer"):
        page.keyboard.press("Shift+Tab")
    focused = "document.activeElement.textContent"
    assert (page.evaluate(focused), heading(page)) == ("What", "The prompt")
    for key, token, title in (("ArrowRight", " time", "Cycle 1 of 2"), ("ArrowDown", " do", "Cycle 1 of 2")):
        page.keyboard.press(key)
        assert (page.evaluate(focused), heading(page)) == (token, title)
    page.keyboard.press("End")
    assert heading(page) == "Cycle 2 of 2"
    assert "Cycle 2 of 2" in page.get_by_label("The selected cycle").get_by_role("status").text_content()
    page.get_by_label("Cycle", exact=True).focus()
    page.keyboard.press("ArrowLeft")
    assert heading(page) == "Cycle 1 of 2"
    page.get_by_role("button", name="Previous cycle").press("Enter")
    assert heading(page) == "The prompt"
    assert page.evaluate("document.activeElement !== document.body"), "the button is disabled now"
    page.keyboard.press("Escape")
    assert (page.evaluate(focused), heading(page)) == ("What", "Every cycle, token by token")


@pytest.mark.exhaustive
def test_slider_stands_below_its_cycle(open_page: Open, address: str, script: Script) -> None:
    """The columns of cycles and the slider below them have one scale: its thumb is as wide as a column, and a
    click on it chooses the cycle above. The panel follows an answer to its last cycle."""
    script.turns = [[FIRST, *(cycle(n, "a", [" b"], " c") for n in range(1, 40))]]
    page = open_page(address)
    ask(page)
    assert heading(page) == "Cycle 39 of 39"
    page.locator(".answer .token").first.click()
    slider = page.get_by_label("Cycle", exact=True)
    picture, below = page.locator(".rhythm svg").bounding_box(), slider.bounding_box()
    assert (picture["x"], picture["width"]) == (below["x"], below["width"])
    for at in (0, 13, 39):
        column = page.locator(".rhythm [data-cycle]").nth(at).bounding_box()
        page.mouse.click(column["x"] + column["width"] / 2, below["y"] + below["height"] / 2)
        assert slider.input_value() == str(at)


@pytest.mark.exhaustive
def test_layout_of_trees(open_page: Open, address: str) -> None:
    """No two boxes of a tree overlap, children stand to the right of their parents, and the
    accepted path is a straight line."""
    nodes = [node(-1, "r", 0, None, 1.0, True)]
    for n, parent in enumerate([0, 0, 0, 1, 1, 2, 5, 5, 3, 8, 8, 7, 10], 1):
        nodes.append(node(parent, f"n{n}" * (1 + n % 3), nodes[parent]["depth"] + 1, 1 / n))
    own = [{"text": "x", "token": 1, "node": None}]
    page = open_page(address)
    drawn, boxes = page.evaluate(
        """async (cycle) => {
            const { drawnNodes, layOut } = await import("./page/layout.js");
            const drawn = drawnNodes(cycle);
            return [drawn, layOut(drawn, (node) => 20 + 8 * node.text.length, { row: 46, box: 38, gap: 26 }).boxes];
        }""",
        {"nodes": nodes, "path": [0, 1, 5, 7], "tokens": own, "bonus_text": "x"},
    )
    assert len(drawn) == len(boxes) == 15
    ends = [box["x"] + box["width"] for box in boxes]
    for i, a in enumerate(boxes):
        assert all(a["y"] != b["y"] or ends[i] < b["x"] or ends[j] < a["x"] for j, b in enumerate(boxes[:i]))
        assert i == 0 or a["x"] > ends[drawn[i]["parent"]]
    assert {boxes[n]["y"] for n in (0, 1, 5, 7, 14)} == {0}


def test_live_view(open_page: Open, address: str, script: Script) -> None:
    """The figures of /stats, polled, and bars as long as they say; an error is shown and goes away again, and an idle
    server has nothing to show."""
    page = open_page(address + "/#live")
    live = page.locator("#live-view")
    live.get_by_text("1,235").wait_for()
    text = live.inner_text()
    for shown in (
        "3 running",
        "of 4 rows, 2 waiting",
        "3.21",
        "depth 3",
        ".25",
        "60 %",
        "up to 16 nodes",
        "nothing was drafted",
    ):
        assert shown in text
    assert live.locator(".rows .used").count() == 3
    shares = live.evaluate("""(live) => [...live.querySelectorAll(".card:last-child tbody td:nth-child(2)")].map((cell) => {
        const [room, bar] = [cell.getBoundingClientRect(), cell.firstElementChild.getBoundingClientRect()];
        return [bar.left - room.left < 2, bar.width / room.width];
    })""")
    assert shares == [[True, pytest.approx(share, abs=0.02)] for share in (0.6, 0.3, 0.1)], "begins at the left, length"
    assert live.get_by_label("Throughput, 1,235 tokens per second").count() == 1
    script.refusal = 503, "the server is shutting down"
    live.get_by_text("the server is shutting down").wait_for()
    script.refusal = None
    live.get_by_role("alert").wait_for(state="hidden")
    nothing = dict.fromkeys(("tau", "mean_cycle_ms"), None)
    idle = {"tokens_per_second": 0, "cycles": 0, **nothing, "accepted_by_depth": [], "decisions": {}}
    script.stats = {**STATS, "running": 0, "waiting": 0, "recent": idle}
    page.get_by_text("Nothing was drafted lately.").wait_for()
    page.get_by_role("link", name="Chat").press("Enter")
    page.get_by_label("Message").wait_for()
    assert page.get_by_role("link", name="Chat").get_attribute("aria-current") == "page"


def test_markup_stays_text(open_page: Open, address: str, script: Script) -> None:
    """Prompts, answers, trees, errors and names are text, whatever they look like."""
    evil = cycle(1, EVIL, [EVIL], EVIL, refused=[EVIL], plan=EVIL)
    script.turns = [[prefill(EVIL), evil], [FIRST, {"error": {"message": EVIL}}]]
    page = open_page(address)
    ask(page, EVIL)
    page.locator(".answer .token").nth(1).click()
    page.get_by_text("All nodes as a table").click()
    assert page.locator(".answer").text_content() == 3 * EVIL
    assert page.locator(".user .text").text_content() == EVIL
    assert page.locator("#model").text_content() == MODEL
    ask(page, EVIL)
    assert page.get_by_role("alert").text_content() == EVIL
    assert page.locator("img").count() == 0
    assert page.evaluate("window.hacked") is None


def test_policy_of_the_served_page(open_page: Any, address: str) -> None:
    """The browser itself refuses inline scripts and markup, should the page ever use them."""
    page = open_page(address)
    policy = page.request.get(address).headers["content-security-policy"]
    assert policy == page_files.SERVED_POLICY
    assert "unsafe" not in policy
    parsed = "try { document.body.innerHTML = '<b>'; 'parsed' } catch (error) { error.name }"
    assert page.evaluate(parsed) == "TypeError"
    assert len(open_page.errors) == 1  # the browser's own complaint about it
    open_page.errors.clear()
    for path in ("__init__.py", "..%2f__init__.py"):
        assert page.request.get(f"{address}/page/{path}").status == 404


def luminance(color: str) -> float:
    """Relative luminance of `rgb(r, g, b)` (WCAG 2)."""
    channels = [int(part) / 255 for part in re.findall(r"\d+", color)[:3]]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.exhaustive
@pytest.mark.parametrize("chosen", [False, True], ids=["asked", "chosen"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(open_page: Open, address: str, scheme: str, chosen: bool) -> None:
    """Text is readable in both schemes, the system's and the one that is chosen: a contrast of 4.5, as WCAG AA asks."""
    page = open_page(address, color_scheme=scheme if not chosen else "light" if scheme == "dark" else "dark")
    if chosen:
        page.get_by_label("Theme").select_option(scheme)
        page.reload()
    probe = """() => ["page", "text", "quiet", "own", "draft", "bad"].map((name) => {
        const probe = document.body.appendChild(document.createElement("i"));
        probe.style.color = `var(--${name})`;
        const color = getComputedStyle(probe).color;
        probe.remove();
        return color;
    })"""
    background, *inks = map(luminance, page.evaluate(probe))
    assert background > 0.9 if scheme == "light" else background < 0.02
    contrasts = [(max(ink, background) + 0.05) / (min(ink, background) + 0.05) for ink in inks]
    assert contrasts.pop(3) > 3, "marks need 3"
    assert min(contrasts) > 4.5


@pytest.mark.exhaustive
def test_narrow_screen(open_page: Open, address: str, script: Script) -> None:
    """Nothing sticks out at 360 pixels, and the cycle leaves room for the answer that it belongs to. The page scrolls as a
    whole there, and the composer lies over its end: a new turn stands above it."""
    script.turns = 6 * [[FIRST, SECOND, THIRD]]
    page = open_page(address, width=360, height=740)
    assert fits(page)
    page.locator("#model").get_by_text(MODEL).wait_for()
    assert page.evaluate("document.documentElement.scrollHeight") == 740, "an empty conversation fills the screen"
    page.get_by_text("Settings").click()
    assert fits(page)
    page.get_by_text("Settings").click()
    ask(page)
    page.locator(".answer .token").nth(2).click()
    assert fits(page)
    sheet = page.get_by_label("The selected cycle").bounding_box()
    token = page.locator(".answer .selected").first.bounding_box()
    assert token["y"] + token["height"] <= sheet["y"]
    page.get_by_role("button", name="Close the cycle").click()
    assert page.get_by_label("The selected cycle").is_hidden()
    for number in range(1, 6):
        ask(page)
        page.locator(".figures").nth(number).wait_for()
    answer, composer = page.locator(".turn").last.bounding_box(), page.locator(".composer").bounding_box()
    assert page.evaluate("scrollY") > 0
    assert answer["y"] + answer["height"] <= composer["y"]
    page.get_by_role("link", name="Live").click()
    page.get_by_text("tokens/s").wait_for()
    assert fits(page)


def test_view_file(open_page: Open, tmp_path: Path) -> None:
    """The same view from one file, with nothing beside it; a text in it cannot end its script. A stop string may have cut
    the text."""

    def view(text: str, *cycles: dict[str, Any]) -> str:
        data = {"prompt": EVIL, "system": None, "target": "tiny", "method": "eagle3", "tau": 2.5, "seconds": 0.25}
        file = tmp_path / "view.html"
        file.write_text(page_files.one_file({**data, "cycles": cycles, "text": text}), encoding="utf-8")
        return file.as_uri()

    requests: list[str] = []
    whole = "What time do you" + 2 * EVIL
    page = open_page(view(whole, FIRST, SECOND, cycle(2, EVIL, [EVIL], EVIL)), reduced_motion="reduce")
    page.on("request", lambda request: requests.append(request.url))
    page.reload()
    assert len(requests) == 1
    assert page.locator(".answer").text_content() == whole
    assert page.locator(".user .text").text_content() == EVIL
    page.locator(".answer .token").nth(1).click()
    assert page.locator("svg.tree g.accepted .token").all_text_contents() == ["\u00b7time", "\u00b7do"]
    page.keyboard.press("ArrowRight")
    assert heading(page) == "Cycle 2 of 2"
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0
    cut = open_page(view("What time do y", FIRST, SECOND, THIRD))
    assert cut.locator(".answer").text_content() == "What time do y"
    assert cut.get_by_text("6 tokens \u00b7 2 cycles").count() == 1


pytestmark = pytest.mark.slow


def test_chat_of_the_embedded_model(open_page: Callable[..., Any], server: Running, llm: eyas.LLM) -> None:
    """The page shows the text of `LLM.generate`, each character in a token of a cycle, and as many
    cycles: what the server sends and what the page reads fit together."""
    page = open_page(server.url)
    page.get_by_text("Settings").click()
    page.get_by_label("Max tokens").fill("24")
    page.get_by_label("Message").fill(PROMPTS[0])
    page.keyboard.press("Enter")
    page.locator("#send:visible").wait_for()
    own = llm.generate(PROMPTS[0], max_new_tokens=24)
    assert page.locator(".answer").text_content() == own.text
    assert "".join(page.locator(".answer .token").all_text_contents()) == own.text
    figures = f"{len(own.token_ids)} tokens \u00b7 {own.stats.cycles} cycles \u00b7 tau {own.stats.tau:.2f}"
    assert figures in page.locator(".figures").inner_text()
    page.locator(".answer .token.drafted").first.click()
    panel = page.get_by_label("The selected cycle")
    first = page.locator(".answer .selected").all_text_contents()
    assert f"{len(first)}\n" in panel.locator(".facts").inner_text()
    accepted = panel.locator("svg.tree g.accepted .token").all_text_contents()
    assert "".join(accepted) == "".join(first[: len(accepted)]).replace(" ", "\u00b7")
    assert panel.locator("svg.tree g").count() > len(first)


def test_live_view_of_the_embedded_model(open_page: Callable[..., Any], server: Running) -> None:
    """The page shows the figures of a request. It shows those of the last ten seconds, so it is opened before the
    request is sent."""
    page = open_page(f"{server.url}/#live")
    page.get_by_text("of 4 rows, 0 waiting").wait_for()
    server.client().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": PROMPTS[1]}], max_tokens=24
    )
    page.get_by_text("depth 1").wait_for()
    assert "by the method's options" in page.locator("#live-view").inner_text()
