// What linear.comp and linear_int.comp share: which rows of x, of the weight and of the result an invocation has.
//
// An invocation makes TILE_ROWS rows times TILE_COLUMNS columns of the result; the columns, which are rows of the
// weight, lie in one tile of it. Beyond the matrix it repeats the last ones and writes nothing.
//
// GROUPED (experts): the rows of x are multiplied with the matrix of an expert each. `work` lists tiles of rows
// (group_experts.comp), dispatched at its worst case; this dispatch does those of the experts it has.
//
// SUBGROUP: each invocation of a subgroup reads another row of x and hands it to the others; subgroups have at least
// TILE_ROWS invocations.

layout(local_size_x = 32, local_size_x_id = 0) in;  // WORKGROUP_X
layout(constant_id = 1) const uint TILE_ROWS = 8;
layout(constant_id = 2) const uint TILE_COLUMNS = 4;  // 1, 2, 4 or 8

layout(push_constant) uniform Push {
    uint x_at;
    uint weight_at;
    uint result_at;
    uint columns;
    uint first;
    uint count;
    uint stride;
#ifdef GROUPED
    uint work_at;
    uint pairs_at;
    uint first_expert;
    uint experts;
    uint top_k;
#else
    uint limit_at;
    uint rows;
#endif
};

layout(std430, binding = 1) readonly buffer WeightBuffer { uvec4 weight[]; };
layout(std430, binding = 2) writeonly buffer Result { float result[]; };
#ifdef GROUPED
layout(std430, binding = 3) readonly buffer Work { uint work[]; };
layout(std430, binding = 4) readonly buffer Pairs { uint pairs[]; };
#else
layout(std430, binding = 3) readonly buffer Limit { int limit[]; };
#endif

#include "weights.glsl"

uint row0;       // first row of the result
uint row_count;  // rows that are written
uint column0;    // first column
uint lane;       // first row inside the weight's tile
uint tile_at;    // where that tile begins, in uvec4

bool locate() {
    const uint tiles = (count + WEIGHT_TILE - 1) / WEIGHT_TILE;
    const uint tile_words = weight_steps(columns) * STEP_WORDS;
    column0 = (gl_WorkGroupID.y * gl_WorkGroupSize.x + gl_LocalInvocationID.x) * TILE_COLUMNS;
    const uint column = min(column0, tiles * WEIGHT_TILE - TILE_COLUMNS);
    lane = column % WEIGHT_TILE;
    tile_at = weight_at / 4 + column / WEIGHT_TILE * tile_words;
#ifdef GROUPED
    const uint entry = work_at + 1 + 3 * gl_WorkGroupID.x;
    if (gl_WorkGroupID.x >= work[work_at]) {
        return false;
    }
    const uint expert = work[entry];
    if (expert < first_expert || expert - first_expert >= experts) {
        return false;
    }
    tile_at += (expert - first_expert) * tiles * tile_words;
    row0 = work[entry + 1];
    row_count = work[entry + 2];
#else
    const uint end = uint(min(int(rows), limit[limit_at]));
    row0 = gl_WorkGroupID.x * TILE_ROWS;
    if (row0 >= end) {
        return false;
    }
    row_count = min(end - row0, TILE_ROWS);
#endif
    return true;
}

// The row of x that makes row row0 + m of the result.
uint x_row(uint m) {
    const uint row = row0 + min(m, row_count - 1);
#ifdef GROUPED
    return top_k == 0 ? row : pairs[pairs_at + row] / top_k;
#else
    return row;
#endif
}

void store(float total[TILE_ROWS][TILE_COLUMNS]) {
    [[unroll]] for (uint m = 0; m < TILE_ROWS; m++) {
        [[unroll]] for (uint n = 0; n < TILE_COLUMNS; n++) {
            if (m < row_count && column0 + n < count) {
                result[result_at + (row0 + m) * stride + first + column0 + n] = total[m][n];
            }
        }
    }
}
