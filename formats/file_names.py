"""Names of the files that lowbit writes beside the weights of a packed folder."""

from lowbit.formats.layout.manifest import MANIFEST_FILE
from lowbit.formats.tasks import TASKS_FILE

README = "README.md"
SOURCE_README = "SOURCE_README.md"  # the original's README.md, whose place our card takes
DRAFT = "MODEL_CARD.md"
QUALITY_FILE = "quality.json"
HTML_FILE = "quality.html"
BENCH_FILE = "bench.json"
CARDS = (README, DRAFT)  # a person may have edited them
# Each is written in one piece, with a name of its own until it is whole.
REPORT_FILES = frozenset({QUALITY_FILE, HTML_FILE, TASKS_FILE, BENCH_FILE, *CARDS})
# A source's files of these names say something about other weights.
NEVER_PASSED = (MANIFEST_FILE, QUALITY_FILE, HTML_FILE, TASKS_FILE, BENCH_FILE, SOURCE_README)
