// head_finish: each row's maximum, lowest token of it, sum of exponentials, entropy, and the tile of its sampled token,
// from its tiles. Sums over tiles are carried as two floats.
//
// tiles     Tile [rows, tile_count]     of head_tiles; head.glsl
// uniforms  float [uniform_rows, 2]     high and low part of a number in [0, 1]; rows beyond take row 0's
// result    Row [rows]                  head.glsl
//
// push: tile_count, uniform_rows. Groups: (rows); one workgroup a row. Reference: cpu/head.py finish.
#version 450
#extension GL_GOOGLE_include_directive : require

layout(local_size_x = 64, local_size_x_id = 0) in;  // WORKGROUP_X

layout(push_constant) uniform Push {
    uint tile_count;
    uint uniform_rows;
};

#include "head.glsl"
#include "twofloat.glsl"

layout(std430, binding = 0) readonly buffer Tiles { Tile tiles[]; };
layout(std430, binding = 1) readonly buffer Uniforms { float uniforms[]; };
layout(std430, binding = 2) writeonly buffer Result { Row result[]; };

shared float tops[gl_WorkGroupSize.x];
shared int tokens[gl_WorkGroupSize.x];
shared uint broken;
shared vec2 totals[gl_WorkGroupSize.x];
shared vec2 slopes[gl_WorkGroupSize.x];

// The tile's sum of exp(z - largest of the row).
float mass(Tile tile, float largest) {
    return tile.total > 0.0 ? tile.total * exp32(tile.largest - largest) : 0.0;
}

void main() {
    const uint me = gl_LocalInvocationID.x;
    const uint row = gl_WorkGroupID.x;
    const uint base = row * tile_count;
    // consecutive tiles each, so that sums in the order of tiles can be taken up anywhere
    const uint each = (tile_count + gl_WorkGroupSize.x - 1) / gl_WorkGroupSize.x;
    const uint begin = min(me * each, tile_count), end = min(begin + each, tile_count);
    if (me == 0) {
        broken = 0;
    }
    barrier();

    float top = MINUS_INFINITY;
    int token = 0;
    for (uint t = begin; t < end; t++) {
        const Tile tile = tiles[base + t];
        if (tile.argmax == BROKEN) {
            broken = 1;
        }
        if (tile.largest > top) {
            top = tile.largest;
            token = tile.argmax;
        }
    }
    tops[me] = top;
    tokens[me] = token;
    barrier();
    for (uint i = 0; i < gl_WorkGroupSize.x; i++) {
        if (tops[i] > top || (tops[i] == top && tokens[i] < token)) {
            top = tops[i];
            token = tokens[i];
        }
    }

    vec2 total = vec2(0.0), slope = vec2(0.0);
    for (uint t = begin; t < end; t++) {
        const Tile tile = tiles[base + t];
        const float e = mass(tile, top);
        if (e > 0.0) {
            total = two_add(total, e);
            const float scale = exp32(tile.largest - top);
            slope = two_add(slope, scale * (tile.weighted + (tile.largest - top) * tile.total));
        }
    }
    totals[me] = total;
    slopes[me] = slope;
    barrier();
    if (me != 0) {
        return;
    }

    total = vec2(0.0);
    slope = vec2(0.0);
    for (uint i = 0; i < gl_WorkGroupSize.x; i++) {
        total = two_add(total, totals[i]);
        slope = two_add(slope, slopes[i]);
    }
    float entropy = two_log(total) - slope.x / total.x;
    entropy = entropy > 0.0 ? entropy : 0.0;
    if (entropy < 0.00390625) {  // multiples of 2^-32: their sums are exact, in float64 and in entropy_bound.comp
        entropy = floor(entropy * 4294967296.0) / 4294967296.0;
    }
    if (broken != 0 || !(total.x >= 1.0)) {  // the largest z alone adds 1
        entropy = uintBitsToFloat(0x7FC00000u);
    }

    const uint u = 2 * (row < uniform_rows ? row : 0);
    const vec2 target = two_mul(vec2(uniforms[u], uniforms[u + 1]), total);
    // the part of the tiles, then the tile: the first at whose end the sum is above the target, else the last one of all
    uint part = 0;
    vec2 before_part = vec2(0.0), passed = vec2(0.0);
    for (uint i = 0; i < gl_WorkGroupSize.x; i++) {
        if (totals[i].x > 0.0) {
            part = i;
            before_part = passed;
            passed = two_add(passed, totals[i]);
            if (greater(passed, target)) {
                break;
            }
        }
    }
    uint chosen = 0;
    vec2 before = before_part;
    passed = before_part;
    for (uint t = part * each; t < min(part * each + each, tile_count); t++) {
        const float e = mass(tiles[base + t], top);
        if (e > 0.0) {
            chosen = t;
            before = passed;
            passed = two_add(passed, e);
            if (greater(passed, target)) {
                break;
            }
        }
    }
    const vec2 residual = two_add(target, -before);
    result[row] = Row(top, total.x, total.y, token, entropy, chosen, residual.x, residual.y);
}
