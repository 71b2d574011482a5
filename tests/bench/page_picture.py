"""python tests/bench/page_picture.py: pictures/page.webp, what README shows of the page at /.

Chromium shows the real page of the real server over the scripted engine: words and speeds are this file's.
"""
import base64
import re
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "pictures"
WINDOW = {"width": 1280, "height": 960}
SYSTEM = "You are a careful assistant for a repository of water levels. " * 160
YESTERDAY = "Summaries of the day, one line for each gauge. " * 90
THOUGHT = "They ask what a river says. Rivers do not speak; say so kindly, and name what one hears."
DAY = """It says **very little**, and says it all day:

- water over stone, and a lower note where it is deep
- the rain of last night, two hours late
- a tree that fell in March"""
NIGHT = """The same words, but nobody else is talking, so you hear the *ends* of them:

```python
def heard(words, hour):
    return words if 22 <= hour or hour < 5 else words[:-2]
```

By four the gravel is louder than the town. If you want to write it down, stand where the bank is low, and count how
long each note lasts before the next one takes it over.

What they say then is still very little. But it comes slower, and from further off: the weir two miles up opens at
eleven, and the river speaks of it at one. Somebody who has lived on this bank for forty years told me that she does not
look at the clock in the kitchen at night, because she can hear how late it is. """
ANSWERS = {
    "What does the river say?": f"{THOUGHT}</think>{DAY}",
    "And at night?": "The same river, one street further.</think>"
                     + re.sub(r"(?<=[a-z,.:])\n(?=[a-z])", " ", NIGHT) + "I asked her to write it down. " * 99,
    "agent": "</think>" + "I read the next file, and then the one behind it. " * 400,
    "short": "</think>Done.",
}


def picture(folder):
    """The file; `folder` takes states on disk."""
    from importlib.resources import files

    from browser import Tabs, ask, chromium
    from running_server import start, stop

    from ds4mlx.text.tokenizer import Tokenizer
    tokenizer = Tokenizer.from_json(files("ds4mlx.tiny.lessons") / "tokenizer.json")

    def script(prompt):
        said = tokenizer.decode(prompt)
        return tokenizer.encode_marked(ANSWERS[max(ANSWERS, key=said.rfind)])

    settings = {"batched_session": 4, "ctx": 65536, "kv_disk_dir": folder / "kv", "prefill_chunk": 256}
    earlier = start(tokenizer, script, settings=settings)
    tell(earlier, YESTERDAY, "A question of yesterday, short")
    stop(earlier)       # which keeps its state
    server = start(tokenizer, script, settings=settings, step_s=0.016, before_prefill=lambda: time.sleep(0.08))
    try:
        with chromium() as browser:
            tabs = Tabs(browser)
            page = tabs.open(server.url, viewport=WINDOW, color_scheme="light")
            tell(server, YESTERDAY, "A question of yesterday, short")
            talk(server, page, ask)
            shot = page.context.new_cdp_session(page).send("Page.captureScreenshot", {
                "format": "webp", "quality": 80, "clip": {"x": 0, "y": 0, **WINDOW, "scale": 1.6}})
            page.keyboard.press("Escape")
            tabs.close()
            for known in server.service.requests():
                server.service.cancel(known.id)
    finally:
        stop(server)
    return base64.b64decode(shot["data"])


def talk(server, page, ask):
    """Two questions on the page, and agents beside it that share a beginning."""
    from browser import answered
    ask(page, "What does the river say?")
    answered(page, "a tree that fell in March")
    page.wait_for_timeout(1500)
    for who in ("first", "second"):
        threading.Thread(target=tell, args=(server, SYSTEM, f"You are the {who} agent"), daemon=True).start()
        page.wait_for_timeout(1200)
    ask(page, "And at night?")
    page.get_by_text("because she can hear").wait_for()
    page.wait_for_timeout(300)


def tell(server, system, question):
    """One request of a client of the Messages API."""
    server.client.post("/v1/messages", timeout=60, json={
        "system": system, "messages": [{"role": "user", "content": question}], "max_tokens": 3000})


if __name__ == "__main__":
    import tempfile
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "server")]
    with tempfile.TemporaryDirectory() as folder:
        drawn = picture(Path(folder))
    (FOLDER / "page.webp").write_bytes(drawn)
    print(f"{FOLDER / 'page.webp'}: {len(drawn):,} bytes")
