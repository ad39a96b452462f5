"""Pages of graphs in a browser: do clicks, search and keys do what they should, and how fast does a page open?

Needs playwright (``pip install 'fxround[browser]'``) and Chromium of the system, whose path ``CHROMIUM`` may say. Each
check is a function of an open page that raises an AssertionError. Writes results/graph_pages.json; a failed check is
an error and writes nothing.

python -m benchmarks.graph_pages
"""

from __future__ import annotations

import io
import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

import fxround
from benchmarks import harness
from benchmarks.tables import RESULTS

OPENINGS: Final = 5
# The least ratio of luminances of text and ground, of WCAG 2.2, 1.4.3.
LEGIBLE: Final = 4.5
SIZE: Final = {"width": 1280, "height": 900}


class Stack(nn.Module):
    """Five equal layers, and a function between them that is called again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(5))
        self.act = nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map float32 [n, 8] to the same shape."""
        for layer in self.layers:
            x = x + self.act(layer(x))
        return torch.softmax(x, -1)


def stack() -> tuple[nn.Module, torch.Tensor, bool]:
    """Return a small model, whose page is coloured by bits and by shares, too."""
    return Stack(), torch.linspace(-2, 2, 32).reshape(4, 8), True


def gpt2() -> tuple[nn.Module, torch.Tensor, bool]:
    """Return GPT-2 with twelve layers and random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(use_cache=False)), torch.arange(32).reshape(1, 32), False


def resnet50() -> tuple[nn.Module, torch.Tensor, bool]:
    """Return ResNet-50 with random weights."""
    from torchvision.models import resnet50 as build

    return build(), torch.linspace(0, 1, 3 * 224 * 224).reshape(1, 3, 224, 224), False


MODELS: Final = {"5 layers, three colourings": stack, "GPT-2, 12 layers": gpt2, "ResNet-50": resnet50}


def write_page(path: Path, model: nn.Module, x: torch.Tensor, studied: bool) -> dict[str, Any]:
    """Write the page of a model; returns its data."""
    model.eval()
    with torch.no_grad():
        compiled = fxround.compile(model, "stochastic", example_inputs=x)
    reports = [fxround.variability(model, x, capture="nodes"), fxround.attribute(model, x)] if studied else None
    text = compiled.draw(path, report=reports).read_text(encoding="utf-8")
    shown: dict[str, Any] = json.loads(text.partition('id="graph">')[2].partition("</script>")[0])
    return shown


# ---- what is visible ----


def boxes(page: Any) -> list[dict[str, Any]]:
    """Return rectangle, label and fill of every box, in pixels of the window."""
    script = """() => [...document.querySelectorAll(".item:not(.opened)")].map(item => {
        const shape = item.querySelector(".box"), {x, y, width, height} = shape.getBoundingClientRect();
        return {x, y, width, height, label: item.getAttribute("aria-label"), id: item.id};
    })"""
    rows: list[dict[str, Any]] = page.evaluate(script)
    return rows


def settled(page: Any) -> None:
    """Wait until the browser has painted twice."""
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


# ---- checks ----


def check_start(page: Any, data: dict[str, Any]) -> None:
    """The whole graph is in sight, with every box apart from the others, and no more than a person can read."""
    shown = boxes(page)
    assert 3 <= len(shown) <= 45, len(shown)
    for i, a in enumerate(shown):
        assert a["x"] >= 0 and a["x"] + a["width"] <= SIZE["width"] - 330, a
        assert a["y"] >= 40 and a["y"] + a["height"] <= SIZE["height"], a
        for b in shown[:i]:
            apart_x = abs(2 * a["x"] + a["width"] - 2 * b["x"] - b["width"]) >= a["width"] + b["width"]
            apart_y = abs(2 * a["y"] + a["height"] - 2 * b["y"] - b["height"]) >= a["height"] + b["height"]
            assert apart_x or apart_y, (a, b)
    layers = [i for i, group in enumerate(data["groups"]) if group["kind"] == "layers"]
    folded = {f"g{i}" for i in layers} & {row["id"] for row in shown}
    assert len(page.query_selector_all(".behind")) == 2 * len(folded)


def check_picture(page: Any, data: dict[str, Any]) -> None:
    """In the screenshot, every box is a rectangle of its colour that text is written on, and edges are drawn."""
    import numpy as np
    from PIL import Image

    settled(page)
    pixels = np.asarray(Image.open(io.BytesIO(page.screenshot())).convert("RGB")).astype(int)
    ground = pixels[60, 5]
    for shown in boxes(page):
        left, top, right, bottom = (
            round(n) for n in (shown["x"], shown["y"], shown["x"] + shown["width"], shown["y"] + shown["height"])
        )
        inside = pixels[top + 3 : bottom - 3, left + 3 : right - 3].reshape(-1, 3)
        colours, counts = np.unique(inside, axis=0, return_counts=True)
        fill = colours[counts.argmax()]
        assert counts.max() > 0.5 * len(inside) and abs(fill - ground).sum() > 12, shown
        text = abs(inside - fill).sum(1) > 200
        assert 0.004 < text.mean() < 0.35, (shown, text.mean())
    assert len(page.query_selector_all("path.edge")) >= len(boxes(page)) - 1


def check_contrast(page: Any, data: dict[str, Any]) -> None:
    """Headings of boxes, quiet texts, labels of edges and the panel are legible on their grounds."""
    script = """() => {
        const pen = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
        const luminance = colour => {
            pen.clearRect(0, 0, 1, 1); pen.fillStyle = colour; pen.fillRect(0, 0, 1, 1);
            const linear = [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3)
                .map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
        };
        const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        const of = (element, name) => luminance(getComputedStyle(element)[name]);
        const ground = of(document.body, "backgroundColor"), panel = document.getElementById("panel");
        const pairs = [[of(panel, "color"), of(panel, "backgroundColor")]];
        for (const item of document.querySelectorAll(".item:not(.opened)"))
            for (const text of item.querySelectorAll("text:not(.sign)"))
                pairs.push([of(text, "fill"), of(item.querySelector(".box"), "fill")]);
        for (const text of document.querySelectorAll("text.edge")) pairs.push([of(text, "fill"), ground]);
        return Math.min(...pairs.map(([a, b]) => ratio(a, b)));
    }"""
    least = page.evaluate(script)
    assert least >= LEGIBLE, least


def check_click(page: Any, data: dict[str, Any]) -> None:
    """A click opens a module, which shows its children, and a second click on its heading closes it."""
    before = {shown["id"] for shown in boxes(page)}
    closed = next(i for i, g in enumerate(data["groups"]) if f"g{i}" in before)
    children = {f"g{c['group']}" if "group" in c else f"n{c['node']}" for c in data["groups"][closed]["children"]}
    page.locator(f"#g{closed}").click()
    assert {shown["id"] for shown in boxes(page)} == before - {f"g{closed}"} | children
    assert page.locator(f"#g{closed}").get_attribute("aria-expanded") == "true"
    assert page.locator("#panel h2").inner_text() == data["groups"][closed]["label"]
    page.locator(f"#g{closed} .head").click()
    assert {shown["id"] for shown in boxes(page)} == before


def check_search(page: Any, data: dict[str, Any]) -> None:
    """A search by module, operator, line and rounding finds what the data have, and Enter shows it."""
    operations = [node for node in data["nodes"] if node["facts"]]
    last = operations[-1]
    for fact in ("module", "operator", "source", "rounding"):
        wanted = next(node["facts"][fact] for node in reversed(operations) if node["facts"][fact])
        page.keyboard.press("/")
        page.locator("#query").fill(wanted)
        expected = sum(any(wanted.lower() in text.lower() for text in texts(node)) for node in data["nodes"])
        assert page.locator("#count").inner_text().startswith(f"{expected:,} of "), (wanted, expected)
        page.keyboard.press("Escape")
        assert page.locator("#count").inner_text() == ""
    page.locator("#query").fill(last["name"] + " " + last["facts"]["operator"])
    page.keyboard.press("Enter")
    found = page.locator(".item.selected")
    assert found.count() == 1 and last["label"] in found.get_attribute("aria-label")
    shown = page.locator("#panel dl").first.inner_text()
    assert all(str(last["facts"][fact]) in shown for fact in ("operator", "module", "source", "rounding", "status"))
    place = found.bounding_box()
    assert 0 < place["x"] < SIZE["width"] - 330 and 40 < place["y"] < SIZE["height"]
    page.keyboard.press("Escape")


def texts(node: dict[str, Any]) -> Iterator[str]:
    """Yield what the page searches of a node."""
    facts = node["facts"]
    searched = ("operator", "module", "source", "code", "rounding", "accumulate")
    yield from (node["label"], node["name"], node["class"], node["value"], *(facts.get(key, "") for key in searched))


def check_keyboard(page: Any, data: dict[str, Any]) -> None:
    """Arrows reach a module, Enter opens and closes it, Escape goes to the module around it, and 0 shows all."""
    page.reload()
    before = len(boxes(page))
    page.locator("#picture").focus()
    selected = page.locator(".item.selected")
    for _ in range(30):
        page.keyboard.press("ArrowDown")
        if selected.get_attribute("aria-expanded") == "false":
            break
    opened = selected.get_attribute("id")
    page.keyboard.press("Enter")
    assert selected.get_attribute("aria-expanded") == "true" and len(boxes(page)) > before
    page.keyboard.press("ArrowDown")
    assert selected.get_attribute("id") != opened
    assert page.locator("#picture").get_attribute("aria-activedescendant") == selected.get_attribute("id")
    page.keyboard.press("Escape")
    assert selected.get_attribute("id") == opened
    page.keyboard.press(" ")
    assert selected.get_attribute("aria-expanded") == "false" and len(boxes(page)) == before
    width = boxes(page)[0]["width"]
    page.keyboard.press("+")
    assert boxes(page)[0]["width"] > width
    page.keyboard.press("0")
    settled(page)
    assert abs(boxes(page)[0]["width"] - width) < 1


def check_zoom(page: Any, data: dict[str, Any]) -> None:
    """The wheel enlarges what is under the pointer, and a drag moves the graph without a click."""
    page.reload()
    first = boxes(page)[0]
    x, y = first["x"] + 5, first["y"] + 5
    page.mouse.move(x, y)
    page.mouse.wheel(0, -300)
    settled(page)
    larger = boxes(page)[0]
    assert larger["width"] > 1.2 * first["width"]
    assert larger["x"] <= x <= larger["x"] + larger["width"] and larger["y"] <= y <= larger["y"] + larger["height"]
    page.mouse.down()
    page.mouse.move(x + 60, y + 40, steps=4)
    page.mouse.up()
    settled(page)
    moved = boxes(page)[0]
    assert abs(moved["x"] - larger["x"] - 60) < 1 and abs(moved["y"] - larger["y"] - 40) < 1
    assert page.locator(".item.selected").count() == 0
    page.locator("#fit").click()


def check_colours(page: Any, data: dict[str, Any]) -> None:
    """Another property changes the legend and the texts of boxes to its own."""
    for i, colouring in enumerate(data["colourings"]):
        if len(data["colourings"]) > 1:
            page.locator("#colour select").select_option(str(i))
        assert page.locator("#legend b").inner_text() == colouring["title"]
        assert page.locator("#legend .chip").count() == len(colouring["legend"])
        for shown in boxes(page):
            mark = colouring["groups" if shown["id"][0] == "g" else "nodes"][int(shown["id"][1:])]
            assert mark["said"] in shown["label"], (shown, mark)
    assert page.locator("#colour").is_visible() == (len(data["colourings"]) > 1)


def check_all_open(page: Any, data: dict[str, Any]) -> None:
    """All modules can be opened, and then every node is a box; and closed."""
    page.locator("#open").click()
    assert {shown["id"] for shown in boxes(page)} == {f"n{i}" for i in range(len(data["nodes"]))}
    page.locator("#close").click()
    assert len(boxes(page)) == len(data["groups"][0]["children"])


CHECKS: Final[tuple[Callable[[Any, dict[str, Any]], None], ...]] = (
    check_start,
    check_picture,
    check_contrast,
    check_click,
    check_search,
    check_keyboard,
    check_zoom,
    check_colours,
    check_all_open,
)


def measured(browser: Any, path: Path, data: dict[str, Any]) -> list[str]:
    """Run the checks in a light and a dark window; returns the cells of the table's row."""
    seconds, started = [], 0
    for scheme in ("light", "dark"):
        page = browser.new_page(viewport=SIZE, color_scheme=scheme)
        page.set_default_timeout(20_000)
        messages, requests = [], []
        page.on("console", lambda message, messages=messages: messages.append(message.text))
        page.on("pageerror", lambda error, messages=messages: messages.append(str(error)))
        page.on("request", lambda request, requests=requests: requests.append(request.url))
        for _ in range(OPENINGS):
            page.goto(path.as_uri())
            settled(page)
            seconds.append(page.evaluate("() => performance.now()") / 1000)
        started = len(boxes(page))
        for check in CHECKS:
            print(f"  {scheme}: {check.__name__}", flush=True)
            check(page, data)
        assert not messages, messages
        assert set(requests) == {path.as_uri()}, requests
        page.close()
    size = f"{path.stat().st_size / 1e3:,.0f} kB"
    return [f"{len(data['nodes']):,}", str(started), size, f"{statistics.median(seconds):.2f} s"]


def main() -> None:
    """Check the pages of all models, and store what was measured."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sys.exit("playwright is needed here and not installed: pip install 'fxround[browser]'")
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("no chromium is installed: set CHROMIUM to the path of a browser")
    rows = []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        # Without a sandbox of its own, Chromium starts for root, too. The pages are those that this file wrote.
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for i, (name, build) in enumerate(MODELS.items()):
            print(name, flush=True)
            torch.manual_seed(0)
            path = Path(folder) / f"{i}.html"
            data = write_page(path, *build())
            rows.append([name, *measured(browser, path, data)])
        conditions = harness.conditions("python -m benchmarks.graph_pages", where=f", Chromium {browser.version}")
        browser.close()
    columns = ["model", "nodes", "boxes at the start", "file", "opens in"]
    checked = f"{len(CHECKS)} checks of each page in a light and a dark window passed"
    table = conditions | {"columns": columns, "numbers": [1, 2, 3, 4], "rows": rows, "checked": checked}
    (RESULTS / "graph_pages.json").write_text(json.dumps({"graph_pages": table}, indent=2) + "\n", encoding="utf-8")
    print(f"{checked}: {RESULTS / 'graph_pages.json'}")


if __name__ == "__main__":
    main()
