"""A Cloud Storage of this machine: tensorstore's own client for gs:// talks to it over HTTP.

It has what the JSON API has of objects: each is there whole or not at all, has a generation, and
is written, read, listed and deleted under one name; there are no folders and no renaming. Every
call is written down, and calls can be refused.
"""

import contextlib
import http.server
import json
import re
import threading
import urllib.parse

BUCKET = "bucket"


class Cloud(http.server.ThreadingHTTPServer):
    """`objects` are the contents by name, `calls` pairs of verb and name in their order."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("localhost", 0), Request)
        self.objects, self.generations, self.calls = {}, {}, []
        self.lock = threading.Lock()
        self.refuse = lambda verb, name: False  # which calls get a 403, or the code that it says
        # Which answers are lost on their way: what was asked for is done, and a 503 or a part of
        # what was read comes back.
        self.lose = lambda verb, name: False

    @property
    def environment(self):
        return {
            "TENSORSTORE_GCS_HTTP_URL": f"http://localhost:{self.server_port}",
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "nobody",
        }


@contextlib.contextmanager
def cloud():
    server = Cloud()
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


class Request(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer is one packet: in two, the second waits for a delayed ACK
    disable_nagle_algorithm = True

    def do_GET(self):
        bucket, name, words = self.asked()
        if bucket != BUCKET:
            return self.answer(404)
        if name is None:
            found = [self.facts(one) for one in self.listed(words)]
            return self.answer(200, json.dumps({"items": found}).encode())
        with self.server.lock:
            there, content = name in self.server.objects, self.server.objects.get(name, b"")
            facts = self.facts(name) if there else {}
        if not there:
            return self.answer(404)
        if code := self.refused("read", name):
            return self.answer(code)
        if words.get("alt") != "media":
            return self.answer(200, json.dumps(facts).encode())
        if self.server.lose("read", name):
            return self.cut(content)
        ranged = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        headers = {"x-goog-generation": facts["generation"]}
        if ranged is None:
            return self.answer(200, content, headers)
        first, last = int(ranged[1]), int(ranged[2] or len(content) - 1)
        if first >= len(content):
            return self.answer(416)
        part = content[first : last + 1]
        headers["Content-Range"] = f"bytes {first}-{first + len(part) - 1}/{len(content)}"
        return self.answer(206, part, headers)

    def do_POST(self):
        bucket, _, words = self.asked()
        content, name = self.rfile.read(int(self.headers["Content-Length"])), words["name"]
        if bucket != BUCKET:
            return self.answer(404)
        if code := self.refused("write", name):
            return self.answer(code)
        with self.server.lock:
            generation = self.server.generations.get(name, 0)
            if words.get("ifGenerationMatch", str(generation)) != str(generation):
                return self.answer(412)
            self.server.objects[name] = content
            self.server.generations[name] = len(self.server.calls) + 1
            facts = self.facts(name)
            self.server.calls.append(("write", name))
        if self.server.lose("write", name):
            return self.answer(503)
        return self.answer(200, json.dumps(facts).encode())

    def do_DELETE(self):
        _, name, _ = self.asked()
        if code := self.refused("delete", name):
            return self.answer(code)
        with self.server.lock:
            there = self.server.objects.pop(name, None) is not None
            self.server.generations.pop(name, None)
            self.server.calls.append(("delete", name))
        return self.answer(204 if there else 404)

    def asked(self):
        url = urllib.parse.urlsplit(self.path)
        found = re.fullmatch(r"(?:/upload)?/storage/v1/b/([^/]+)/o(?:/(.+))?", url.path)
        name = found[2] and urllib.parse.unquote(found[2])
        return found[1], name, dict(urllib.parse.parse_qsl(url.query))

    def listed(self, words):
        begin, end = words.get("startOffset", ""), words.get("endOffset", "\U0010ffff")
        with self.server.lock:
            names = sorted(self.server.objects)
        return [n for n in names if begin <= n < end and n.startswith(words.get("prefix", ""))]

    def facts(self, name):
        size, generation = len(self.server.objects[name]), self.server.generations[name]
        return {"name": name, "size": str(size), "generation": str(generation)}

    def refused(self, verb, name):
        """The code of a refusal; 0: there is none."""
        said = self.server.refuse(verb, name)
        return 403 if said is True else int(said)

    def cut(self, content):
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2])
        self.close_connection = True

    def answer(self, code, body=b"", headers=()):
        self.send_response(code)
        for key, value in dict(headers).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass
