#!/bin/sh
# usage: install_browser.sh VENV
# Chromium for the tests of the report's page, where there is none: Debian's package for root, else Playwright's own,
# in a folder of the virtual environment. Always succeeds: without a browser these tests are skipped, and say so.
venv=$1
"$venv/bin/python" -c 'import sys; from tests.browser import find_browser; sys.exit(not find_browser())' && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "Installing Chromium for the tests of the report's page ..."
    export DEBIAN_FRONTEND=noninteractive
    if timeout 120 apt-get update -qq >/dev/null 2>&1 &&
        timeout 600 apt-get install -qq -y --no-install-recommends chromium >/dev/null 2>&1; then
        exit 0
    fi
fi
echo "Loading Playwright's Chromium into $venv/browsers for the tests of the report's page ..."
if "$venv/bin/python" -m pip install -qq --disable-pip-version-check playwright >/dev/null 2>&1 &&
    PLAYWRIGHT_BROWSERS_PATH=$venv/browsers timeout 600 "$venv/bin/playwright" install chromium >/dev/null 2>&1; then
    exit 0
fi
echo "There is no Chromium: the tests of the report's page will be skipped. BESPOKE_BROWSER may name a browser."
exit 0
