"""From bytes on disk to chunks of symbols: corpus, split, lanes."""

from mulstm.data.alphabet import Alphabet
from mulstm.data.corpus import Corpus, Split, fetch, load
from mulstm.data.lanes import Chunk, Lanes

__all__ = ["Alphabet", "Chunk", "Corpus", "Lanes", "Split", "fetch", "load"]
