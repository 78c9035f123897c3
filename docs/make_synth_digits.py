"""Draw the contact sheet of the synthetic digits: `python docs/make_synth_digits.py`."""

from pathlib import Path

from PIL import Image

from bespokefl.data import synth_digits

ROWS, COLUMNS, SIZE, ENLARGED = 6, 20, 32, 2


def main() -> None:
    x, _ = synth_digits(ROWS * COLUMNS, size=SIZE)
    sheet = x.reshape(ROWS, COLUMNS, 3, SIZE, SIZE).transpose(0, 3, 1, 4, 2).reshape(ROWS * SIZE, COLUMNS * SIZE, 3)
    image = Image.fromarray(sheet).quantize(128, dither=Image.Dither.NONE)  # a third of the bytes
    image = image.resize((image.width * ENLARGED, image.height * ENLARGED), Image.Resampling.NEAREST)
    image.save(Path(__file__).parent / "images" / "synth-digits.png", optimize=True)


if __name__ == "__main__":
    main()
