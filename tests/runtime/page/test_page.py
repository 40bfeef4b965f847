"""The page in headless Chromium, against canned answers."""

from collections.abc import Callable
from threading import Event
from typing import Any

import pytest

from tests.runtime.page.stub import Canned, Stub, spoken

pytestmark = [pytest.mark.clients, pytest.mark.slow]
Open = Callable[..., Any]
ASK, LAST, FIGURES = "#ask", ".assistant:last-child", ".assistant:last-child .meta span"


def say(page: Any, text: str) -> None:
    page.fill(ASK, text)
    page.press(ASK, "Enter")


def said(page: Any, text: str) -> str:
    """Ask, wait for the end and return the answer's text."""
    count = page.locator(".assistant").count()
    say(page, text)
    page.wait_for_selector(f".assistant:not(.live) >> nth={count}")
    shown: str = page.inner_text(f"{LAST} .text")
    return shown


def asked(stub: Stub) -> list[str]:
    """Contents of the messages of the last request."""
    return [message["content"] for message in stub.requests[-1]["messages"]]


def test_an_answer_streams_with_its_figures(stub: Stub, open_page: Open) -> None:
    page, go_on = open_page(), Event()
    stub.answers = [
        Canned([{"reasoning": "Let me <b>see</b>."}, *spoken("It is **blue**, é😀.")], wait=go_on)
    ]
    page.wait_for_selector("#model:text('Qwen3.5-4B-int4')")
    assert page.is_disabled("#send")
    say(page, "Why?")
    page.wait_for_selector("details.live summary:text('Thinking')")
    assert not page.locator("details").evaluate("each => each.open")
    assert page.get_attribute("#send", "aria-label") == "Stop"
    assert page.get_attribute(LAST, "aria-busy") == "true"
    go_on.set()
    page.wait_for_selector(FIGURES)
    assert page.inner_text(f"{LAST} .text") == "It is blue, é😀."
    assert page.inner_text(f"{LAST} strong") == "blue"
    page.click("summary")
    assert page.inner_text(".thought") == "Let me <b>see</b>."
    rate, first, tokens = page.locator(FIGURES).all_inner_texts()
    assert rate.startswith(tuple("123456789"))
    assert "tok/s" in rate
    assert "to first token" in first
    assert tokens == "321 tokens (120 thinking)"
    assert page.get_attribute(LAST, "aria-busy") == "false"
    assert page.inner_text("#status") == "The answer is complete."
    assert stub.requests == [
        {
            "model": "Qwen3.5-4B-int4",
            "messages": [{"role": "user", "content": "Why?"}],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]
    assert not [path for path in stub.asked if "favicon" in path]


def test_text_of_the_model_never_becomes_html(stub: Stub, open_page: Open) -> None:
    page = open_page()
    hostile = (
        "<img src=x onerror=document.title='bad'><script>document.title='bad'</script> "
        "[a](javascript:document.title='bad') ![b](https://example.com/x.png) "
        '[c](https://example.com/?q="><b>) <https://example.com>\n\n'
        "```html<img>\n<img src=x onerror=document.title='bad'>\n```\n"
        "| <i>x</i> |\n|--|\n| <u>y |\n"
    )
    stub.answers = [Canned([{"reasoning": hostile}, {"content": hostile}])]
    shown = said(page, "<img src=x onerror=document.title='bad'>")
    assert "<script>document.title='bad'</script>" in shown
    assert page.locator("li img, li script, li b, li i, li u, li iframe").count() == 0
    links = page.locator(f"{LAST} a").evaluate_all("all => all.map(each => each.href)")
    assert links
    assert all(link.startswith("https://example.com") for link in links)
    rels = page.locator(f"{LAST} a").evaluate_all("all => all.map(each => each.rel)")
    assert set(rels) == {"noopener noreferrer"}
    assert page.title() == "Qwen3.5-4B-int4 · lowbit"
    assert set(stub.asked) <= {"/", "/health", "/v1/models", *(f"/page/{n}" for n in PARTS)}


PARTS = (
    *("page.css", "page.js", "answer.js", "client.js", "elements.js", "markdown.js", "marks.js"),
    *("memory.js", "pictures.js", "icon.svg"),
)


def test_stopping_keeps_what_has_come(stub: Stub, open_page: Open) -> None:
    page = open_page()
    stub.answers = [Canned([{"content": "one two"}], wait=Event())]
    stops: list[Callable[[], Any]] = [
        lambda: page.click("#send"),
        lambda: page.press(ASK, "Escape"),
    ]
    for stop in stops:
        stub.left.clear()
        say(page, "count")
        page.wait_for_selector(f"{LAST}.live p:text('one two')")
        stop()
        page.wait_for_selector(f"{LAST} .meta span:text('stopped')")
        assert page.inner_text(f"{LAST} .text") == "one two"
        assert stub.left.wait(10)
    assert page.get_attribute("#send", "aria-label") == "Send"


def test_retry_edit_and_new_chat(stub: Stub, open_page: Open) -> None:
    page = open_page()
    stub.answers = [Canned(spoken(text)) for text in ("A", "B", "C", "D", "E")]
    assert said(page, "first") == "A"
    assert said(page, "second") == "B"
    assert asked(stub) == ["first", "A", "second"]
    page.click(f"{LAST} >> button:text('Retry')")
    page.wait_for_selector(f"{LAST} p:text-is('C')")
    assert asked(stub) == ["first", "A", "second"]
    page.press(ASK, "ArrowUp")
    page.keyboard.type(", changed")
    page.keyboard.press("Enter")
    page.wait_for_selector(f"{LAST} p:text-is('D')")
    assert asked(stub) == ["first", "A", "second, changed"]
    page.reload()  # the conversation is still there
    assert page.locator(".bubble").all_inner_texts() == ["first", "second, changed"]
    page.hover(".user >> nth=0")
    page.click(".user >> nth=0 >> text=Edit")
    page.keyboard.press("Escape")
    assert page.locator(".bubble").all_inner_texts() == ["first", "second, changed"]
    page.click(".user >> nth=0 >> text=Edit")
    page.fill(".editor textarea", "anew")
    page.click(".editor .primary")
    page.wait_for_selector(f"{LAST} p:text-is('E')")
    assert asked(stub) == ["anew"]
    page.click("#new")
    assert page.is_visible("#welcome")
    assert page.locator("#chat > li").count() == 0
    page.click("#welcome button >> nth=2")
    page.wait_for_selector(FIGURES)
    assert asked(stub) == ["Compare TCP and UDP in a small table"]


def test_a_broken_memory_is_forgotten(stub: Stub, open_page: Open) -> None:
    page = open_page()
    stub.answers = [Canned(spoken("ok"))]
    kept: list[Any] = [
        *(None, 5, [], {"role": "user", "content": 5}, {"role": "robot", "content": "no"}),
        {"role": "user", "content": "kept"},
        {"role": "assistant", "content": "half", "meta": [], "error": 5, "reasoning": {}},
    ]
    forge = """(kept) => {
        sessionStorage.setItem("lowbit.chat", JSON.stringify(kept));
        sessionStorage.setItem("lowbit.key", "[5]");
        localStorage.setItem("lowbit.settings", '{"0": 5, "1": "x", "seed": {}, "system": "Be"}');
    }"""
    page.evaluate(forge, kept)
    page.reload()
    assert page.locator(".bubble").all_inner_texts() == ["kept"]
    assert page.inner_text(f"{LAST} .text") == "half"
    assert page.inner_text(f"{LAST} .meta") == "stopped"
    assert said(page, "on") == "ok"
    assert asked(stub) == ["Be", "kept", "half", "on"]
    page.evaluate(forge, {"0": kept[-2]})
    page.reload()
    assert page.is_visible("#welcome")
    assert said(page, "anew") == "ok"


def test_settings_are_sent_and_kept(stub: Stub, open_page: Open) -> None:
    page = open_page()
    stub.answers = [Canned(spoken("ok"))]
    page.keyboard.press("Alt+s")
    values = {"temperature": "0.7", "top_p": "0.9", "top_k": "20", "min_p": "0.05"}
    for name, value in {**values, "max_tokens": "77", "seed": "5", "system": "Be brief"}.items():
        page.fill(f"#{name}", value)
    page.check("input[value=off]", force=True)
    page.fill("#top_p", "1.5")  # out of range: marked, and not sent
    page.click("#close-settings")
    page.reload()
    said(page, "hi")
    body = stub.requests[-1]
    assert asked(stub) == ["Be brief", "hi"]
    assert body["messages"][0]["role"] == "system"
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    numbers = {key: body.get(key) for key in (*values, "max_tokens", "seed")}
    assert numbers == {
        "temperature": 0.7,
        "top_p": None,
        "top_k": 20,
        "min_p": 0.05,
        "max_tokens": 77,
        "seed": 5,
    }
    page.click("#open-settings")
    assert page.input_value("#seed") == "5"
    page.click("#defaults")
    page.click("text=Done")
    said(page, "hi")
    assert stub.requests[-1].keys() == {"model", "messages", "stream", "stream_options"}


def test_a_server_with_a_key_is_asked_with_it(stub: Stub, open_page: Open) -> None:
    stub.key, stub.report = "geheim", True
    stub.answers = [Canned(spoken("ok"))]
    page = open_page()
    page.wait_for_selector("#settings[open] #key:focus")
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    page.wait_for_selector("#settings[open] #key-note:text('does not accept this key')")
    page.keyboard.press("Escape")
    say(page, "hi")
    page.wait_for_selector(".error b:text('The server wants an API key')")
    page.click("text=Enter API key")
    page.fill("#key", "geheim")
    page.keyboard.press("Enter")
    page.wait_for_selector("#model:text('Qwen3.5-4B-int4')")
    page.click(f"{LAST} >> button:text('Retry')")
    page.wait_for_selector(f"{LAST} p:text-is('ok')")
    assert "geheim" not in page.evaluate("JSON.stringify(localStorage)")
    with page.expect_download() as download:  # a link could not show the key
        page.click("#report")
    assert download.value.suggested_filename == "quality.html"


def test_the_report_is_linked_where_there_is_one(stub: Stub, open_page: Open) -> None:
    page = open_page()
    page.wait_for_selector("#model:text('Qwen3.5-4B-int4')")
    assert page.is_hidden("#report")
    stub.report = True
    page.reload()
    with page.expect_popup() as popup:
        page.click("#report")
    assert popup.value.inner_text("h1") == "Quality"


ERRORS = [
    (
        Canned(status=429, error={"message": "too many requests are waiting"}),
        "The server is busy",
        "Too many requests are waiting.",
    ),
    (
        Canned(status=400, error={"message": "no", "code": "context_length_exceeded"}),
        "The conversation is too long for the model",
        "No.",
    ),
    (
        Canned(spoken("half"), error={"message": "the server failed"}),
        "The answer failed",
        "The server failed.",
    ),
    (
        Canned(spoken("half"), cut=True),
        "The answer failed",
        "The stream ended before the answer did.",
    ),
    (Canned(status=502), "The answer failed", "The server answered with status 502."),
]


def test_errors_are_readable(stub: Stub, open_page: Open) -> None:
    page = open_page()
    for canned, title, text in ERRORS:
        stub.answers = [canned, Canned(spoken("ok"))]
        shown = said(page, "hi")
        assert page.inner_text(".error b") == title
        assert page.inner_text(".error p") == text
        assert shown == ("half" if canned.parts else "")  # what has come stays
        page.click(f"{LAST} >> button:text('Retry')")
        page.wait_for_selector(f"{LAST} p:text-is('ok')")
        assert asked(stub) == ["hi"]
        page.click("#new")


def test_a_server_that_is_gone_is_named(stub: Stub, open_page: Open) -> None:
    page = open_page()
    page.wait_for_selector("#model:text('Qwen3.5-4B-int4')")
    page.route("**/v1/**", lambda route: route.abort())
    page.reload()
    said(page, "hi")
    assert page.inner_text(".error b") == "The server cannot be reached"
    page.unroute("**/v1/**")
    stub.answers = [Canned(spoken("ok"))]
    page.click(f"{LAST} >> button:text('Retry')")
    page.wait_for_selector(f"{LAST} p:text-is('ok')")
    assert stub.requests[-1]["model"] == "Qwen3.5-4B-int4"


def test_lines_are_written_with_shift(stub: Stub, open_page: Open) -> None:
    page = open_page()
    stub.answers = [Canned(spoken("ok"), reason="length")]
    page.fill(ASK, "a")
    height = page.locator(ASK).bounding_box()["height"]
    page.press(ASK, "Shift+Enter")
    page.keyboard.type("b")
    assert page.locator(ASK).bounding_box()["height"] > height
    assert not stub.requests
    page.press(ASK, "Enter")
    page.wait_for_selector(f"{LAST} .meta span:text('cut at the token limit')")
    assert asked(stub) == ["a\nb"]


@pytest.mark.parametrize(("width", "scheme"), [(320, "light"), (360, "dark"), (1600, "light")])
def test_nothing_sticks_out(stub: Stub, open_page: Open, width: int, scheme: str) -> None:
    page = open_page(viewport={"width": width, "height": 640}, color_scheme=scheme)
    long = "x" * 300
    table = "|" + "wide cell|" * 12
    text = f"{long}\n\n`{long}`\n\n```\n{long}\n```\n\n{table}\n{'|-' * 12}|\n{table}\n\n- {long}\n"
    stub.answers = [Canned([{"content": text, "reasoning": long}])]
    said(page, long)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("document.querySelector('main').scrollWidth <= innerWidth")
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    light = sum(map(int, ground[4:-1].split(","))) > 3 * 128
    assert light == (scheme == "light")
    page.click("#open-settings")
    box = page.locator("#settings").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width


def test_everything_has_a_name_and_can_be_reached_by_keys(stub: Stub, open_page: Open) -> None:
    page = open_page()
    stub.answers = [Canned([{"reasoning": "hm"}, {"content": "```py\nx\n```"}])]
    said(page, "hi")
    page.click("#open-settings")
    nameless = page.evaluate(
        """() => [...document.querySelectorAll("button, input, textarea, a, summary")].filter(
            (each) => !(each.textContent.trim() || each.ariaLabel || each.labels?.length)
        ).map((each) => each.outerHTML)"""
    )
    assert nameless == []
    page.keyboard.press("Escape")
    seen = set()
    for _ in range(20):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.id || document.activeElement.localName"))
    assert {"new", "open-settings", "ask", "summary", "button", "pre"} <= seen


def test_a_growing_text_is_shown_as_a_whole_one(open_page: Open) -> None:
    """Blocks that are kept while the text grows are those of the whole text."""
    page = open_page()
    same = page.evaluate(
        """async (text) => {
            const { MarkdownView } = await import("/page/markdown.js");
            const [grown, whole] = [document.createElement("div"), document.createElement("div")];
            const view = new MarkdownView(grown);
            for (let end = 1; end <= text.length; end += 1) view.update(text.slice(0, end));
            new MarkdownView(whole).update(text);
            return [grown.innerHTML, whole.innerHTML];
        }""",
        MARKDOWN,
    )
    assert same[0] == same[1]
    assert same[0] == HTML


MARKDOWN = """# Title #
Some *text* with **bold `code`**, ~~gone~~, 2 * 3 * 4, snake_case_name and \\*stars\\*
on two lines. [Link](https://a.b/c_d_e "t"), https://a.b.

1. one
   - in `it`

     second paragraph
2. two
```py
if x:
    y
```
> quoted
> - list

a | b
--|--
1 | `x`
***
~~~
open fence"""
HTML = (
    "<h3>Title</h3><p>Some <em>text</em> with <strong>bold <code>code</code></strong>, "
    "<del>gone</del>, 2 * 3 * 4, snake_case_name and *stars*\non two lines. "
    '<a href="https://a.b/c_d_e" target="_blank" rel="noopener noreferrer" '
    'title="https://a.b/c_d_e">Link</a>, <a href="https://a.b" target="_blank" '
    'rel="noopener noreferrer" title="https://a.b">https://a.b</a>.</p>'
    "<ol><li>one<ul><li>in <code>it</code><p>second paragraph</p></li></ul></li><li>two</li></ol>"
    "{py}if x:\n    y</code></pre></div><blockquote><p>quoted</p>"
    "<ul><li>list</li></ul></blockquote>"
    '<div class="table" tabindex="0" role="region" aria-label="Table"><table><thead><tr><th>a</th>'
    "<th>b</th></tr></thead><tbody><tr><td>1</td><td><code>x</code></td></tr></tbody></table></div>"
    "<hr>{text}open fence</code></pre></div>"
)
CODE = (
    '<div class="code"><div class="code-head"><span>{}</span><button type="button" '
    'class="plain copy">Copy</button></div><pre tabindex="0"><code>'
)
HTML = HTML.format(py=CODE.format("py"), text=CODE.format("text"))
