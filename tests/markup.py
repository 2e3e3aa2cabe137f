"""A page as a browser takes it apart, for the tests of pages."""

import html.parser


class Tags(html.parser.HTMLParser):
    """Checks that tags are closed in order; keeps the links. `open` is empty at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.sources += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "br", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
