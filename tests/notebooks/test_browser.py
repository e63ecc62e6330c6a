"""A notebook in a real JupyterLab, in a real browser: all cells run, the stepper's picture follows its slider, and
axe finds no barrier in the outputs. Needs Debian's chromium and playwright."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
NOTEBOOK = "03_block_table_and_slot_mapping.ipynb"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ALLOWED = {"aria-input-field-name"}  # ipywidgets' slider has no name of its own

playwright_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (apt-get install chromium)")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a JupyterLab whose every setting, and the notebook, lie in a temporary folder."""
    folder = tmp_path_factory.mktemp("lab")
    (folder / "work").mkdir()
    shutil.copy(ROOT / "notebooks" / NOTEBOOK, folder / "work")
    names = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTERLAB_WORKSPACES_DIR", "IPYTHONDIR")
    settings = folder / "settings"
    notification = settings / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    notification.parent.mkdir(parents=True)
    notification.write_text(json.dumps({"fetchNews": "false", "checkForUpdates": False}))
    env = os.environ | {name: str(folder / name.lower()) for name in names} | {"JUPYTERLAB_SETTINGS_DIR": str(settings)}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), env.get("PYTHONPATH", "")])
    port = free_port()
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", f"--port={port}"]
    command += ["--ServerApp.port_retries=0", "--IdentityProvider.token=tok", f"--ServerApp.root_dir={folder / 'work'}"]
    log = (folder / "log").open("w")
    server = subprocess.Popen(
        [*command, "--allow-root", "--expose-app-in-browser"], env=env, stdout=log, stderr=log, cwd=folder
    )
    try:
        for _ in range(240):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/api/status?token=tok", timeout=2).close()
                break
            except OSError:
                assert server.poll() is None, (folder / "log").read_text()
                time.sleep(0.25)
        else:
            raise AssertionError((folder / "log").read_text())
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(20)
        log.close()


READY = """() => {
  const panel = window.jupyterapp?.shell?.currentWidget;
  const session = panel?.sessionContext;
  return !!session?.isReady && session.session?.kernel?.connectionStatus === 'connected'
    && session.session.kernel.status === 'idle';
}"""


@pytest.fixture(scope="module")
def page(lab: str) -> Iterator[Any]:
    """The notebook, opened and run from top to bottom."""
    with playwright_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.set_default_timeout(90_000)
        page.goto(f"{lab}/lab/tree/{NOTEBOOK}?token=tok&reset")
        page.wait_for_function(READY)
        page.evaluate(
            "() => { window.jupyterapp.commands.execute('notebook:run-all-cells').then(() => { window.done = true }) }"
        )
        page.wait_for_function("() => window.done === true")
        page.wait_for_selector(".widget-slider .noUi-handle")
        yield page
        browser.close()


def test_the_picture_follows_the_slider(page: Any) -> None:
    picture = page.locator(".jupyter-widgets img[data-step]")
    assert picture.get_attribute("data-step") == "0"
    page.locator(".widget-slider .noUi-handle").first.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_selector('.jupyter-widgets img[data-step="1"]')
    page.keyboard.press("ArrowRight")
    page.wait_for_selector('.jupyter-widgets img[data-step="2"]')
    assert "2" in picture.get_attribute("alt")


def test_every_picture_is_drawn(page: Any) -> None:
    widths = page.eval_on_selector_all(".jp-OutputArea-output img", "images => images.map(i => i.naturalWidth)")
    assert widths
    assert min(widths) > 50


def test_only_exercises_fail(page: Any) -> None:
    errors = page.locator('.jp-OutputArea-output[data-mime-type="application/vnd.jupyter.stderr"]').all_text_contents()
    assert [text.split(":")[0] for text in errors] == ["ex03", "ex03_2"]


def test_axe_finds_no_barrier_in_the_outputs(page: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    results = axe.Axe().run(page, context=".jp-OutputArea-output")
    violations = {violation["id"]: violation["help"] for violation in results.response["violations"]}
    assert {key: text for key, text in violations.items() if key not in ALLOWED} == {}
    assert results.response["passes"], "axe looked at nothing"
