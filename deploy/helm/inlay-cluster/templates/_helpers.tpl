{{- define "inlay.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "inlay.mounts" -}}
- {name: models, mountPath: /models, readOnly: true}
- {name: keys, mountPath: /keys, readOnly: true}
{{- end }}

{{- define "inlay.volumes" -}}
- {name: models, persistentVolumeClaim: {claimName: {{ .Values.models.claim | quote }}, readOnly: true}}
- {name: keys, secret: {secretName: {{ .Values.apiKeys.secret | quote }}}}
{{- end }}
