"""The page's chat: Markdown that cannot become a script, reasoning, limits, conversations, keyboard, phone, dark."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest
from llmopt.engine.server.protocol.server_options import ScriptedText, ServerOptions

from ...support.browser import CHROMIUM, Page, opened_page
from ...support.live_server import RunningServer, make_engine, running
from .test_reasoning import TEMPLATE

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")

ANSWER = "## Hi\n<img src=x onerror=pwned=1>\n```py\nx = '<b>'\n```"
SCRIPT = (
    ScriptedText("Show me", f"<think>Rain? Hm.\n</think>\n\n{ANSWER}"),
    ScriptedText("Only think", "<think>Rain? Hm.\n</think>\n"),
)
LAST = "[...document.querySelectorAll('.turn')].at(-1)"
DONE = f"{LAST}.querySelector('.meta')?.textContent"

MARKDOWN = """# One *two*

A line with `<code>`, **bold _and_ both**, ~~gone~~, snake_case_name, 2 * 3 * 4 and \\*stars\\*.
See [a page](https://host.test/a_(b) "title"), <https://host.test/c> or https://host.test/d.

1. first
   - inner
     ```sh
     ls | wc
     ```
2. second
> quoted
> - list

| a | b |
|---|--:|
| `1` | x \\| y |

---
~~~
open
"""

ATTACKS = [
    "<script>pwned=1</script>",
    "<img src=x onerror=pwned=1>",
    "<svg/onload=pwned=1><iframe srcdoc='<script>parent.pwned=1</script>'>",
    "[a](javascript:pwned=1) [b](<javascript:pwned=1>) [c](JaVaScRiPt:pwned=1) [d](\\x01javascript:pwned=1)",
    "[e](java\tscript:pwned=1) [f](data:text/html,<script>pwned=1</script>) [g](vbscript:pwned) [h](//x.test)",
    '[i](https://x.test "\\" onmouseover=\\"pwned=1") [j](https://x.test/"onclick="pwned=1)',
    "![k](https://x.test/leak?q=1) ![l](javascript:pwned=1) ![<img src=x onerror=pwned=1>](x)",
    "```<script>pwned=1</script>\n</code></pre><script>pwned=1</script>\n```",
    '```"><img src=x onerror=pwned=1>\n</pre>',
    "| <script>pwned=1</script> |\n|--|\n| <a href='javascript:pwned=1'>x</a> |",
    '> # <script>pwned=1</script>\n1. <style>*{display:none}</style>\n<https://x.test/"onload=pwned=1>',
    "`` ` <script>pwned=1</script> ``&lt;script&gt;&#106;avascript:pwned",
]

ALLOWED = (
    "p h3 h4 h5 h6 ul ol li blockquote hr div table thead tbody tr th td pre code span button a strong em del "
    "math mrow mi mn mo mtext mspace mfrac msqrt mroot msub msup msubsup munder mover munderover mtable mtr mtd"
)

PARTS = r"""> quoted
goes on
> ```
> code

text AT&amp;T &lt;b&gt; &#8364; &#x41; `&amp;` &nonsense; &#0;

- [x] done
- [ ] open

Of $5 to $10, $a_1^{2}$ and \(\frac{1}{\sqrt[3]{x}}\), $k$-means, $\nonsense{x}$, $HOME/$USER.

$$
\sum_{n=1}^\infty
- \begin{pmatrix} 1 & \text{if } x \\ 3 & 4 \end{pmatrix}
$$
$$ open
"""
SHOWN_PARTS = (
    '<blockquote><p>quoted\ngoes on</p><div class="code">',
    "<code>code</code></pre></div></blockquote><p>",
    "AT&amp;T &lt;b&gt; € A <code>&amp;amp;</code> &amp;nonsense; &amp;#0;",
    '<li class="task"><p>☑ done</p></li><li class="task"><p>☐ open</p></li>',
    "Of $5 to $10, <math><msubsup><mi>a</mi><mn>1</mn><mn>2</mn></msubsup></math> and <math><mfrac><mn>1</mn>"
    "<mroot><mi>x</mi><mn>3</mn></mroot></mfrac></math>, <math><mi>k</mi></math>-means, $\\nonsense{x}$, "
    "$HOME/$USER.",
    '<p class="formula"><math display="block"><munderover><mo>∑</mo>',
    "<mtr><mtd><mn>1</mn></mtd><mtd><mtext>if&nbsp;</mtext><mi>x</mi></mtd></mtr>",
    "<p>$$ open",
)

STREAM = """
(text, step) => import('/page/markdown.js').then(({ showMarkdown }) => {
  const log = document.getElementById('log');
  const box = document.createElement('div');
  log.append(box);
  for (let end = 0; end < text.length; end += step) showMarkdown(box, text.slice(0, end));
  showMarkdown(box, text);
  const streamed = box.innerHTML;
  box.replaceChildren();
  showMarkdown(box, text);
  const found = [...box.querySelectorAll('*')];
  for (const one of found) for (const kind of ['click', 'mouseover', 'error', 'load']) {
    if (one.localName !== 'a') one.dispatchEvent(new Event(kind));
  }
  const links = [...box.querySelectorAll('a')];
  const attributes = found.flatMap((one) => one.getAttributeNames());
  const shown = box.textContent;
  box.remove();
  return {
    same: streamed === box.innerHTML, shown, html: streamed,
    tags: [...new Set(found.map((one) => one.localName))],
    attributes: [...new Set(attributes)],
    links: links.map((link) => [link.textContent, link.getAttribute('href'), link.rel]),
  };
})
"""

CONTRAST = """
(() => {
  const levels = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => levels(color).slice(0, 3).map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const under = (one) => {
    const color = one ? getComputedStyle(one).backgroundColor : 'rgb(255, 255, 255)';
    return levels(color)[3] === 0 ? under(one.parentElement) : color;
  };
  const weak = [];
  for (const one of document.querySelectorAll('body *')) {
    const words = [...one.childNodes].filter((node) => node.nodeType === 3 && node.data.trim());
    if (!words.length || !one.checkVisibility() || one.closest('.hidden, svg, :disabled')) continue;
    const [a, b] = [light(getComputedStyle(one).color), light(under(one))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) weak.push([one.className || one.id || one.localName, ratio]);
  }
  return weak;
})()
"""


@pytest.fixture(scope="module")
def scripted() -> Iterator[RunningServer]:
    with running(make_engine(), ServerOptions(script=SCRIPT), chat_template=TEMPLATE) as it:
        yield it


async def _open(page: Page, url: str) -> None:
    await page.open(url)
    await page.wait_for("document.getElementById('model').value === 'tiny'")


async def _count(page: Page, selector: str) -> int:
    return await page.run(f"document.querySelectorAll({selector!r}).length")


def test_a_conversation_by_keyboard_is_kept_made_again_and_deleted(scripted: RunningServer) -> None:
    async def visit() -> None:
        async with opened_page() as page:
            await _open(page, scripted.url)
            await page.run(
                "navigator.clipboard.writeText = async (text) => { window.copied = text; }"
            )
            await page.run("document.getElementById('message').focus()")
            await page.type("Show")
            await page.press("Enter", shift=True)
            assert await page.run("document.activeElement.value") == "Show\n"
            assert await _count(page, ".turn") == 0
            await page.run("document.activeElement.value = ''")
            await page.type("Show me")
            await page.press("Enter")
            await page.wait_for(f"{DONE}.includes('tokens/s')")

            # Reasoning is there and folded; the answer is Markdown, its HTML text.
            assert await page.run("document.querySelector('.reasoning').open") is False
            assert await page.run("document.querySelector('.thoughts').textContent") == "Rain? Hm."
            assert await page.run(f"{LAST}.querySelector('h4').textContent") == "Hi"
            shown = await page.run(f"{LAST}.querySelector('.text').textContent")
            assert "Rain" not in shown and "<img src=x onerror=pwned=1>" in shown
            assert await _count(page, ".text img") == 0
            await page.run("document.querySelector('.code .copy').click()")
            await page.wait_for("document.querySelector('.code .copy').textContent === 'Copied'")
            assert await page.run("window.copied") == "x = '<b>'"
            assert await page.run("window.pwned") is None
            assert await _count(page, ".limit:not(:empty)") == 0

            # Made again, and cut by the limit, which is said to those who see and to those who hear.
            await page.run("document.getElementById('max-tokens').value = 3")
            await page.run("document.querySelector('.regenerate').click()")
            await page.wait_for(f"{DONE}.includes('3 tokens')")
            assert await _count(page, ".turn") == 2
            why = "Stopped by the limit of 3 tokens"
            assert why in await page.run(f"{LAST}.textContent")
            assert why in await page.run("document.getElementById('announce').textContent")

            # Kept over a reload, listed, opened, and deleted at the second press.
            await page.call("Page.reload")
            await page.wait_for("document.querySelectorAll('.turn').length === 2")
            assert why in await page.run(f"{LAST}.textContent")
            await page.run("document.getElementById('clear').click()")
            assert await _count(page, ".turn") == 0
            await page.run("document.getElementById('chats-toggle').click()")
            await page.press("Escape")
            assert await page.run("document.activeElement.id") == "chats-toggle"
            assert await page.run("document.getElementById('chats').hidden")
            await page.press("Enter")
            await page.run("document.querySelector('.chat-title').click()")
            assert await _count(page, ".turn") == 2
            await page.run("document.getElementById('chats-toggle').click()")
            await page.run("document.querySelector('.chats .quiet').click()")
            assert await page.run("Object.keys(localStorage).length") == 1
            await page.run("document.querySelector('.chats .quiet').click()")
            assert await page.run("Object.keys(localStorage).length") == 0
            assert await _count(page, ".turn") == 0
            assert page.problems == []

    asyncio.run(visit())


def test_markdown_is_shown_and_never_becomes_a_script(scripted: RunningServer) -> None:
    async def visit() -> None:
        async with opened_page() as page:
            await _open(page, scripted.url)

            async def shown(text: str, step: int = 1) -> dict[str, list[str]]:
                found = await page.run(f"({STREAM})({json.dumps(text)}, {step})")
                assert set(found["tags"]) <= set(ALLOWED.split()), text
                names = "class type aria-label tabindex start href title target rel display stretchy width"
                assert set(found["attributes"]) <= set(names.split()), text
                for _, address, rel in found["links"]:
                    assert address.startswith("https://") and "noopener" in rel
                return found

            html = (await shown(MARKDOWN))["html"]
            for part in (
                "<h3>One <em>two</em></h3>",
                "<code>&lt;code&gt;</code>, <strong>bold <em>and</em> both</strong>, <del>gone</del>, snake_case_name, "
                "2 * 3 * 4 and *stars*.",
                'href="https://host.test/a_(b)" title="title"',
                'href="https://host.test/d"',
                '<ol start="1"><li><p>first</p><ul><li><p>inner</p><div class="code">',
                "<code>ls | wc</code>",
                "</li><li><p>second</p></li></ol><blockquote><p>quoted</p><ul><li><p>list</p></li></ul></blockquote>",
                '<td class="left"><code>1</code></td><td class="right">x | y</td>',
                "<hr>",
                '<pre tabindex="0"><code>open\n</code></pre>',
            ):
                assert part in html, (part, html)

            html = (await shown(PARTS))["html"]
            for part in SHOWN_PARTS:
                assert part in html, (part, html)

            for attack in ATTACKS:
                # A NUL and other control characters come as a model may write them.
                found = await shown(attack.replace("\\x01", "\x01"))
                assert all("javascript" not in address for _, address, _ in found["links"])
            # Linear, where a parser may be made to search again and again.
            for piece in (
                "[",
                "![",
                "*",
                "**a",
                "_a ",
                "`a``",
                "> ",
                "- ",
                "|-",
                "[a](",
                "<h",
                "~~~",
                "1. ",
                "$a ",
                "$$\n",
                "\\[\n",
                "\\(",
                "${",
                "&#",
                "> a\n",
            ):
                await shown(piece * (60_000 // len(piece)), step=20_000)
            assert await page.run("window.pwned") is None
            tried = "(() => { try { document.body.innerHTML = '<p>' } catch (error) { return error.name } })()"
            assert await page.run(tried) == "TypeError"

    asyncio.run(visit())


def test_a_sent_message_is_edited_and_an_empty_answer_says_why(scripted: RunningServer) -> None:
    async def visit() -> None:
        async with opened_page() as page:
            await _open(page, scripted.url)
            assert await page.run("document.getElementById('served').textContent") == "tiny"
            samples = await page.run("document.getElementById('samples').textContent")
            assert "hash table" in samples and "Lily" not in samples  # it has a chat template
            await page.run("document.getElementById('message').focus()")
            for text, turns in (("Only think", 2), ("Show me", 4)):
                await page.type(text)
                await page.press("Enter")
                await page.wait_for(f"{DONE}.includes('tokens')")
                assert await _count(page, ".turn") == turns
            limit = "[...document.querySelectorAll('.limit')].map((one) => one.textContent)"
            why = "The model ended after its reasoning, without an answer."
            assert await page.run(limit) == [why, ""]

            # Left with Escape, a message stays; sent again, it takes the place of what came after it.
            await page.run("document.querySelector('.edit').click()")
            assert await page.run("document.activeElement.value") == "Only think"
            await page.type(", not")
            await page.press("Escape")
            assert (
                await page.run("document.querySelector('.turn.user .text').textContent")
                == "Only think"
            )
            await page.run("document.querySelector('.edit').click()")
            await page.run("document.activeElement.value = ''")
            await page.type("Show me <b>")
            await page.press("Enter")
            await page.wait_for(
                f"document.querySelectorAll('.turn').length === 2 && {DONE}.includes('tokens')"
            )
            assert (
                await page.run("document.querySelector('.turn.user .text').textContent")
                == "Show me <b>"
            )
            assert await page.run(f"{LAST}.querySelector('h4').textContent") == "Hi"
            await page.call("Page.reload")
            await page.wait_for("document.querySelectorAll('.turn').length === 2")
            assert page.problems == []

    asyncio.run(visit())


def test_the_engine_is_folded_away_and_dims_without_a_connection() -> None:
    async def visit(server: RunningServer) -> None:
        async with opened_page() as page:
            await _open(page, server.url)
            await page.wait_for("document.getElementById('state').textContent === 'serving'")
            assert "Lily" in await page.run("document.getElementById('samples').textContent")
            width = "document.querySelector('.chat').clientWidth"
            before = await page.run(width)
            await page.run("document.getElementById('fold').click()")
            assert await page.run("document.getElementById('engine').checkVisibility()") is False
            assert await page.run(width) > 1.2 * before
            server.wait_until_idle()  # nobody asks for the engine's state
            await page.call("Page.reload")
            await page.wait_for("document.getElementById('fold')?.textContent === 'Show engine'")
            await page.run("document.getElementById('fold').click()")
            await page.wait_for("document.getElementById('state').textContent === 'serving'")
            shown = "getComputedStyle(document.querySelector('.cards')).opacity"
            assert await page.run(shown) == "1"
            server.loop.fail("the engine failed")
            await page.wait_for(
                "document.getElementById('state').textContent === 'the engine failed'"
            )
            assert float(await page.run(shown)) < 1

    with running(make_engine(num_blocks=60, block_size=16)) as server:
        asyncio.run(visit(server))


def test_a_code_line_of_80_characters_and_the_tables_of_a_phone_fit(
    scripted: RunningServer,
) -> None:
    async def visit() -> None:
        async with opened_page() as page:
            await _open(page, scripted.url)
            text = json.dumps(f"```py\n{'x' * 80}\n```")
            add = "const box = document.createElement('div'); box.className = 'markdown';"
            add += f"document.getElementById('log').append(box); showMarkdown(box, {text});"
            await page.run(f"import('/page/markdown.js').then(({{ showMarkdown }}) => {{ {add} }})")
            await page.resize(1280)
            fits = "((one) => one.scrollWidth <= one.clientWidth)(document.querySelector('{}'))"
            assert await page.run(fits.format(".code pre"))
            cells = "['7329f3', 'decode', '12000 (6000 cached)', '1200 of 4096', '1024', '120 s']"
            fill = (
                "const row = document.createElement('tr'); row.append(..."
                f"{cells}.map((text) => Object.assign(document.createElement('td'), {{ textContent: text }})));"
                "document.getElementById('sequences').replaceChildren(row);"
            )
            for width in (390, 320):
                await page.resize(width)
                shown = fits.format("#sequences-scroll")
                assert await page.run(f"(() => {{ {fill} return {shown} }})()"), width

    asyncio.run(visit())


@pytest.mark.whole
def test_phone_and_dark_show_everything_readably(scripted: RunningServer) -> None:
    async def visit() -> None:
        async with opened_page() as page:
            await _open(page, scripted.url)
            part = {"text": MARKDOWN + "x" * 300, "reasoning": "Hm.", "end": "length"}
            turns = [
                {"role": "user", "text": "y" * 300, "pictures": []},
                {
                    "role": "assistant",
                    "model": "tiny",
                    "parts": [part],
                    "meta": "9 tokens",
                    "limit": 9,
                },
            ]
            kept = json.dumps(json.dumps({"at": 1, "turns": turns}))
            await page.run(f"localStorage.setItem('llmopt-chat-a', {kept})")
            # What another page of this address has left there is passed over.
            for number, bad in enumerate(
                ("{", "3", '{"turns":[{"role":"user","pictures":["x"]}]}')
            ):
                await page.run(f"localStorage.setItem('llmopt-chat-{number}', {json.dumps(bad)})")
            await page.run("document.getElementById('chats-toggle').click()")
            assert await _count(page, ".chat-title") == 1
            await page.run("document.querySelector('.chat-title').click()")
            await page.run("document.querySelector('.reasoning').open = true")
            await page.run("document.getElementById('chats-toggle').click()")
            for scheme in ("light", "dark"):
                await page.run(f"document.documentElement.style.colorScheme = '{scheme}'")
                for width in (1440, 360):
                    await page.resize(width)
                    assert await page.run("document.documentElement.scrollWidth") <= width
                    assert await page.run(CONTRAST) == [], (scheme, width)
            assert await page.run("document.getElementById('choose').hidden")
            assert page.problems == []

    asyncio.run(visit())
