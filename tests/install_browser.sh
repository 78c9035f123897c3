#!/bin/sh
# Chromium for the tests of the report's page: Debian's package, where it is missing and may be installed.
# Always succeeds: without a browser these tests are skipped, and say so.
for name in chromium chromium-browser google-chrome google-chrome-stable chrome; do
    command -v "$name" >/dev/null 2>&1 && exit 0
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "Installing Chromium for the tests of the report's page ..."
    export DEBIAN_FRONTEND=noninteractive
    if timeout 120 apt-get update -qq >/dev/null 2>&1 &&
        timeout 600 apt-get install -qq -y --no-install-recommends chromium >/dev/null 2>&1; then
        exit 0
    fi
fi
echo "There is no Chromium: the tests of the report's page will be skipped. Install the package chromium to run them."
exit 0
