// attention: softmax(q k^T) v over the cache slots that each row may see; scale 1; several query heads share a K/V
// head. The keys go by in blocks with a running maximum: scores are never held.
//
// q       vec4 [rows, heads, size/4]
// k, v    [kv_heads, capacity, size/4] of 4 values: vec4 (attention_f32), uvec2 of float16 (attention_f16)
// ranges  int [2, rows]      row t sees slots ranges[0, t] <= s < ranges[1, t]; host memory, changes from run to run
// result  vec4 [rows, heads, size/4]
//
// push: rows, heads, kv_heads, capacity; size, a multiple of 4, at most 4 * WORKGROUP_X * QUADS; the _at of every
// binding, multiples of 4 but for ranges_at. Groups: (ceil(rows / TILE_ROWS), heads).
// Reference: reference.attention.
//
// A workgroup makes TILE_ROWS rows of one head. Scores: an invocation takes 4 keys of a block. Values: an invocation
// takes QUADS times 4 of the head's dimensions.
//
// SUBGROUP: each invocation of a subgroup reads another row of q and of the probabilities and hands it to the others;
// subgroups have at least TILE_ROWS invocations.
//
// variant: attention_f32
// variant: attention_f32_subgroup SUBGROUP
// variant: attention_f16 F16
// variant: attention_f16_subgroup F16 SUBGROUP
#version 450
#extension GL_EXT_control_flow_attributes : require
#ifdef SUBGROUP
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require
#endif

layout(local_size_x = 32, local_size_x_id = 0) in;  // WORKGROUP_X
layout(constant_id = 1) const uint TILE_ROWS = 8;
layout(constant_id = 2) const uint QUADS = 2;

layout(push_constant) uniform Push {
    uint q_at;
    uint k_at;
    uint v_at;
    uint ranges_at;
    uint result_at;
    uint rows;
    uint heads;
    uint kv_heads;
    uint capacity;
    uint size;
};

layout(std430, binding = 0) readonly buffer Q { vec4 q[]; };
#ifdef F16
layout(std430, binding = 1) readonly buffer K { uvec2 k[]; };
layout(std430, binding = 2) readonly buffer V { uvec2 v[]; };
const uint QUAD_WORDS = 2;
#define QUAD(word) vec4(unpackHalf2x16(word.x), unpackHalf2x16(word.y))
#else
layout(std430, binding = 1) readonly buffer K { vec4 k[]; };
layout(std430, binding = 2) readonly buffer V { vec4 v[]; };
const uint QUAD_WORDS = 4;
#define QUAD(word) word
#endif
layout(std430, binding = 3) readonly buffer Ranges { int ranges[]; };
layout(std430, binding = 4) writeonly buffer Result { vec4 result[]; };

const float LOWEST = -3.0e38;
const uint KEYS = 4 * gl_WorkGroupSize.x;  // of a block

shared vec4 scores[TILE_ROWS][gl_WorkGroupSize.x];  // of 4 keys each, then their probabilities
shared float maximum[TILE_ROWS];
shared float shrink[TILE_ROWS];  // what the sums so far are multiplied with
shared int tile_from;
shared int tile_to;

void main() {
    const uint me = gl_LocalInvocationID.x;
    const uint row0 = gl_WorkGroupID.x * TILE_ROWS, head = gl_WorkGroupID.y;
    const uint quads = size / 4;
    const uint kv_head = head / (heads / kv_heads);
    const uint k_from = k_at / QUAD_WORDS + kv_head * capacity * quads;
    const uint v_from = v_at / QUAD_WORDS + kv_head * capacity * quads;

    if (me == 0) {
        tile_from = ranges[ranges_at + row0];
        tile_to = ranges[ranges_at + rows + row0];
        for (uint m = 1; m < min(TILE_ROWS, rows - row0); m++) {
            tile_from = min(tile_from, ranges[ranges_at + row0 + m]);
            tile_to = max(tile_to, ranges[ranges_at + rows + row0 + m]);
        }
    }
    if (me < TILE_ROWS) {
        maximum[me] = LOWEST;
    }
    int from[TILE_ROWS], to[TILE_ROWS];
    uint q_from[TILE_ROWS];
    [[unroll]] for (uint m = 0; m < TILE_ROWS; m++) {
        const uint row = min(row0 + m, rows - 1);
        from[m] = ranges[ranges_at + row];
        to[m] = ranges[ranges_at + rows + row];
        q_from[m] = q_at / 4 + (row * heads + head) * quads;
    }
#ifdef SUBGROUP
    const uint my_row = gl_SubgroupInvocationID % TILE_ROWS;
    const uint my_q = q_at / 4 + (min(row0 + my_row, rows - 1) * heads + head) * quads;
#endif

    vec4 total[TILE_ROWS][QUADS];
    float sum[TILE_ROWS];
    [[unroll]] for (uint m = 0; m < TILE_ROWS; m++) {
        sum[m] = 0.0;
        [[unroll]] for (uint d = 0; d < QUADS; d++) {
            total[m][d] = vec4(0.0);
        }
    }
    barrier();
    const int begin = tile_from, end = tile_to;
    for (int block = begin; block < end; block += int(KEYS)) {
        // Scores of my 4 keys; beyond the last the last is repeated, and masked.
        const int key0 = block + 4 * int(me);
        uint k_row[4];
        [[unroll]] for (int j = 0; j < 4; j++) {
            k_row[j] = k_from + uint(min(key0 + j, end - 1)) * quads;
        }
        vec4 score[TILE_ROWS];
        [[unroll]] for (uint m = 0; m < TILE_ROWS; m++) {
            score[m] = vec4(0.0);
        }
        for (uint i = 0; i < quads; i++) {
            vec4 keys[4];
            [[unroll]] for (uint j = 0; j < 4; j++) {
                keys[j] = QUAD(k[k_row[j] + i]);
            }
#ifdef SUBGROUP
            const vec4 mine = q[my_q + i];
#endif
            [[unroll]] for (uint m = 0; m < TILE_ROWS; m++) {
#ifdef SUBGROUP
                const vec4 query = subgroupShuffle(mine, m);
#else
                const vec4 query = q[q_from[m] + i];
#endif
                score[m] += vec4(dot(query, keys[0]), dot(query, keys[1]), dot(query, keys[2]), dot(query, keys[3]));
            }
        }
        bvec4 visible[TILE_ROWS];
        [[unroll]] for (uint m = 0; m < TILE_ROWS; m++) {
            const ivec4 key = key0 + ivec4(0, 1, 2, 3);
            [[unroll]] for (uint j = 0; j < 4; j++) {
                visible[m][j] = key[j] >= from[m] && key[j] < to[m];
            }
            score[m] = mix(vec4(LOWEST), score[m], visible[m]);
            scores[m][me] = score[m];
        }
        barrier();
        if (me < TILE_ROWS) {
            vec4 largest = vec4(maximum[me]);
            for (uint i = 0; i < gl_WorkGroupSize.x; i++) {
                largest = max(largest, scores[me][i]);
            }
            const float most = max(max(largest.x, largest.y), max(largest.z, largest.w));
            shrink[me] = exp(maximum[me] - most);
            maximum[me] = most;
        }
        barrier();
        [[unroll]] for (uint m = 0; m < TILE_ROWS; m++) {
            scores[m][me] = mix(vec4(0.0), exp(score[m] - maximum[m]), visible[m]);
        }
        barrier();

        // Values, weighted.
        [[unroll]] for (uint m = 0; m < TILE_ROWS; m++) {
            const float factor = shrink[m];
            sum[m] *= factor;
            [[unroll]] for (uint d = 0; d < QUADS; d++) {
                total[m][d] *= factor;
            }
        }
        const uint used = min(KEYS, uint(end - block) + 3) / 4;
        for (uint i = 0; i < used; i++) {
            vec4 values[4][QUADS];
            [[unroll]] for (uint j = 0; j < 4; j++) {
                const uint v_row = v_from + uint(min(block + int(4 * i + j), end - 1)) * quads;
                [[unroll]] for (uint d = 0; d < QUADS; d++) {
                    values[j][d] = QUAD(v[v_row + min(me + d * gl_WorkGroupSize.x, quads - 1)]);
                }
            }
#ifdef SUBGROUP
            const vec4 mine = scores[my_row][i];
#endif
            [[unroll]] for (uint m = 0; m < TILE_ROWS; m++) {
#ifdef SUBGROUP
                const vec4 p = subgroupShuffle(mine, m);
#else
                const vec4 p = scores[m][i];
#endif
                sum[m] += p.x + p.y + p.z + p.w;
                [[unroll]] for (uint d = 0; d < QUADS; d++) {
                    total[m][d] += p.x * values[0][d] + p.y * values[1][d] + p.z * values[2][d] + p.w * values[3][d];
                }
            }
        }
        barrier();
    }
    [[unroll]] for (uint m = 0; m < TILE_ROWS; m++) {
        [[unroll]] for (uint d = 0; d < QUADS; d++) {
            const uint quad = me + d * gl_WorkGroupSize.x;
            if (row0 + m < rows && quad < quads) {
                result[result_at / 4 + ((row0 + m) * heads + head) * quads + quad] = total[m][d] / sum[m];
            }
        }
    }
}
