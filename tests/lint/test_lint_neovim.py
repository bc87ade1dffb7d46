"""The settings for Neovim on the page, in one without a screen: what is found shows, and a fix is made."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "en" / "lint.md"
DRIVE = """
vim.cmd("edit a.py")
local buffer = vim.api.nvim_get_current_buf()
local function found() return vim.diagnostic.get(buffer) end
local function line() return vim.api.nvim_buf_get_lines(buffer, 1, 2, false)[1] end
local function wait(condition) assert(vim.wait(60000, condition, 20)) end
vim.ui.select = function(items, _, choose) choose(items[1], 1) end
local ok, problem = pcall(function()
  wait(function() return #found() == 1 end)
  print(("%d:%d %s\\n"):format(found()[1].lnum, found()[1].col, found()[1].message))
  vim.api.nvim_win_set_cursor(0, { 2, found()[1].col })
  local old = line()
  vim.lsp.buf.code_action()
  wait(function() return line() ~= old end)
  vim.cmd("write")
  wait(function() return #found() == 0 end)
end)
if not ok then print(problem) end
vim.cmd(ok and "qa!" or "cquit")
"""


def test_neovim_shows_and_fixes(tmp_path: Path) -> None:
    pytest.importorskip("pygls")
    nvim = shutil.which("nvim")
    if nvim is None:
        pytest.skip("needs Neovim")
    said = subprocess.run([nvim, "--version"], capture_output=True, text=True, check=True).stdout
    version = re.match(r"NVIM v(\d+)\.(\d+)", said)
    assert version is not None
    new, old = re.findall(r"```lua\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    settings = tmp_path / "init.lua"
    settings.write_text(new if (int(version[1]), int(version[2])) >= (0, 11) else old)
    drive = tmp_path / "drive.lua"
    drive.write_text(DRIVE)
    command = tmp_path / "bin" / "flambeau-lint"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m flambeau_lint "$@"\n')
    command.chmod(0o755)
    source = tmp_path / "a.py"
    text = "import torch\ns = '𝑥火'; y = torch.ger(a, b)\n"
    source.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [nvim, "--headless", "-u", settings, "-c", f"luafile {drive}"],
        cwd=tmp_path,
        env={
            **os.environ,
            "HOME": str(tmp_path),
            "LANG": "C.UTF-8",
            "PATH": os.pathsep.join((str(command.parent), os.environ["PATH"])),
            "PYTHONPATH": str(ROOT / "src"),
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1:19 `torch.ger` is deprecated" in done.stdout + done.stderr  # columns in bytes
    assert source.read_text(encoding="utf-8") == text.replace("torch.ger", "torch.outer")
