"""The page in a real browser: it shows what a scripted server sends."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import eyas
from serving import PROMPTS, Running

pytest.importorskip("fastapi", reason="the server needs eyas[serve]")

from eyas.serve import page as page_files
from scripted_server import MODEL, Script, application, cycle, prefill, running

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
