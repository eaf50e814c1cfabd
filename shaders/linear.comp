// linear_*: result = x @ weight.T in float32. experts_linear_*: the same with a matrix for each tile of rows.
//
// x       float [x rows, columns]
// weight  uvec4 [tiles, ...]            weights.glsl; several experts one after the other
// result  float [rows, stride]          written: columns first .. first + count - 1, count rows of `weight`
// limit   int [1]                       rows from here on are not written (linear)
// work    uint [1 + 3 * tiles]          of group_experts (experts_linear)
// pairs   uint [rows]                   of group_experts: row r takes row pairs[r] / top_k of x (experts_linear)
//
// push: columns; first, count, stride; rows (linear); first_expert, experts: those of `weight`, and top_k, 0 if row r
// takes row r of x (experts_linear); the _at of every binding, weight_at a multiple of 4.
// Groups: (ceil(rows / TILE_ROWS), ceil(count / (WORKGROUP_X * TILE_COLUMNS))); experts_linear: (the most tiles, ...).
// Reference: reference.linear, reference.experts.
//
// variant: linear_f32 F32
// variant: linear_f32_subgroup F32 SUBGROUP
// variant: linear_f16 F16
// variant: linear_f16_subgroup F16 SUBGROUP
// variant: linear_bf16 BF16
// variant: linear_bf16_subgroup BF16 SUBGROUP
// variant: linear_q40 Q40
// variant: linear_q40_subgroup Q40 SUBGROUP
// variant: linear_q80 Q80
// variant: linear_q80_subgroup Q80 SUBGROUP
// variant: experts_linear_f32 F32 GROUPED
// variant: experts_linear_f32_subgroup F32 GROUPED SUBGROUP
// variant: experts_linear_f16 F16 GROUPED
// variant: experts_linear_f16_subgroup F16 GROUPED SUBGROUP
// variant: experts_linear_bf16 BF16 GROUPED
// variant: experts_linear_bf16_subgroup BF16 GROUPED SUBGROUP
// variant: experts_linear_q40 Q40 GROUPED
// variant: experts_linear_q40_subgroup Q40 GROUPED SUBGROUP
// variant: experts_linear_q80 Q80 GROUPED
// variant: experts_linear_q80_subgroup Q80 GROUPED SUBGROUP
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require
#ifdef SUBGROUP
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_KHR_shader_subgroup_shuffle : require
#endif

layout(std430, binding = 0) readonly buffer X { float x[]; };

#include "linear.glsl"

// Columns column .. column + 3 of the row of x that begins at `from`; zero beyond the last.
vec4 x_quad(uint from, uint column) {
    if (column + 4 <= columns) {
        return vec4(x[from + column], x[from + column + 1], x[from + column + 2], x[from + column + 3]);
    }
    vec4 values = vec4(0.0);
    for (uint c = 0; column + c < columns; c++) {
        values[c] = x[from + column + c];
    }
    return values;
}

void main() {
    if (!locate()) {
        return;
    }
#ifdef SUBGROUP
    const uint x_from = x_at + x_row(gl_SubgroupInvocationID % TILE_ROWS) * columns;
#else
    uint x_from[TILE_ROWS];
    [[unroll]] for (uint m = 0; m < TILE_ROWS; m++) {
        x_from[m] = x_at + x_row(m) * columns;
    }
#endif

    float total[TILE_ROWS][TILE_COLUMNS];
    [[unroll]] for (uint m = 0; m < TILE_ROWS; m++) {
        [[unroll]] for (uint n = 0; n < TILE_COLUMNS; n++) {
            total[m][n] = 0.0;
        }
    }
    const uint steps = weight_steps(columns);
    for (uint s = 0; s < steps; s++) {
        const uint w_at = tile_at + s * STEP_WORDS;
        float sum[TILE_ROWS][TILE_COLUMNS];
        [[unroll]] for (uint m = 0; m < TILE_ROWS; m++) {
            [[unroll]] for (uint n = 0; n < TILE_COLUMNS; n++) {
                sum[m][n] = 0.0;
            }
        }
        for (uint i = 0; i < STEP_COLUMNS / 4; i++) {
            const uint column = s * STEP_COLUMNS + 4 * i;
            vec4 w[TILE_COLUMNS];
            [[unroll]] for (uint n = 0; n < TILE_COLUMNS; n++) {
                w[n] = weight_quad(w_at, lane + n, i);
            }
#ifdef SUBGROUP
            const vec4 mine = x_quad(x_from, column);
#endif
            [[unroll]] for (uint m = 0; m < TILE_ROWS; m++) {
#ifdef SUBGROUP
                const vec4 values = subgroupShuffle(mine, m);
#else
                const vec4 values = x_quad(x_from[m], column);
#endif
                [[unroll]] for (uint n = 0; n < TILE_COLUMNS; n++) {
                    sum[m][n] += dot(values, w[n]);
                }
            }
        }
        [[unroll]] for (uint n = 0; n < TILE_COLUMNS; n++) {
            const float scale = weight_scale(w_at, lane + n);
            [[unroll]] for (uint m = 0; m < TILE_ROWS; m++) {
                total[m][n] += sum[m][n] * scale;
            }
        }
    }
    store(total);
}
