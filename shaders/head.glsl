// What the shaders behind the last layer share: the buffers they hand on to each other (their layouts:
// ddllm_vk/backends/vulkan_head.py), and z of a token. Includers bind `uint settings[]` as SETTINGS(i) before.

#include "logits.glsl"

const uint TILE = 256;  // tokens of one tile, at most: sampling picks the tile first, then the token in it
const float DEPTH = 22.0;  // tokens this far below a row's maximum are no candidates: cpu/head.py

// One row's tokens of one tile: e = exp(z - largest). argmax: lowest token of the largest z; BROKEN: z is no number.
struct Tile {
    float largest;
    float total;  // sum of e
    float weighted;  // sum of e * (z - largest)
    int argmax;
};
const int BROKEN = -1;

// One row over the whole vocabulary.
struct Row {
    float largest;
    float total;  // total + total_low: sum of exp(z - largest)
    float total_low;
    int argmax;
    float entropy;  // nats, a multiple of 2^-32; NaN: z is no number
    uint tile;  // that the sampled token is in
    float residual;  // residual + residual_low: what the sum of exp(z - largest) over the tile's tokens must exceed at
    float residual_low;  // the sampled token
};

// A row's list of candidates for its self-conditioning embedding.
struct List {
    uint kept;
    float largest;  // z
    float lowest;  // z up to which everything was left out
};

// A row's self-conditioning embedding: of `count` candidates and `dropped` for the rest, or dense row `dense`.
struct Soft {
    float dropped;
    uint count;
    uint dense;  // SPARSE: it is not
};
const uint SPARSE = 0xFFFFFFFFu;

#ifdef SETTINGS
float softcap() {
    return uintBitsToFloat(SETTINGS(0));
}

float inverse_temperature() {
    return uintBitsToFloat(SETTINGS(1));
}

bool is_forbidden(uint row, uint token) {
    if (row == SETTINGS(2)) {
        for (uint i = 0; i < SETTINGS(3); i++) {
            if (SETTINGS(16 + i) == token) {
                return true;
            }
        }
    }
    return false;
}

float token_z(uint row, uint token, float product) {
    return is_forbidden(row, token) ? MINUS_INFINITY : squash(product, softcap(), inverse_temperature());
}
#endif
